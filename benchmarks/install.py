"""How large the package is when it is installed, by extra: ``python -m benchmarks.install``.

Adds up the files of every distribution that an extra needs, as they are in this environment.
"""

from __future__ import annotations

from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.measure import FORMAT, RESULTS
from softmax_rnn._utils.files import write_json
from softmax_rnn.training.environment import environment

EXTRAS = ("", "hf", "train", "report", "all")


def needed(name: str, extra: str, found: dict[tuple[str, str], Distribution]) -> None:
    """Add a distribution, and those that it needs with this extra, to ``found``."""
    key = canonicalize_name(name), extra
    if key in found:
        return
    found[key] = distribution(name)
    for line in found[key].requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            for each in ("", *wanted.extras):
                needed(wanted.name, each, found)


def installed_bytes(extra: str) -> int:
    """The size of everything that the package needs with an extra."""
    found: dict[tuple[str, str], Distribution] = {}
    for each in {"", extra}:
        needed("softmax-rnn", each, found)
    distributions = {name: each for (name, _), each in found.items()}
    files = (path.locate() for each in distributions.values() for path in each.files or ())
    return sum(path.stat().st_size for path in map(Path, map(str, files)) if path.exists())


def main() -> None:
    """Measure every extra, and write the result."""
    sizes = {extra: installed_bytes(extra) for extra in EXTRAS}
    result = {
        "format": FORMAT,
        "benchmark": "install",
        "command": "python -m benchmarks.install",
        "environment": environment(),
        "bytes": sizes,
    }
    write_json(RESULTS / "install.json", result)
    for extra, size in sizes.items():
        print(f"{extra or 'no extra'}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
