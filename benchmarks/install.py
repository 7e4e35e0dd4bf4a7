"""How large the package is when it is installed, by extra: ``python -m benchmarks.install``.

Adds up the files of every distribution that an extra needs, as they are in this environment.
``--lock uv.lock`` reads instead what the build of PyTorch with CUDA downloads: the sizes of the
wheels in the lock file that ``uv lock`` writes, without a download, for a project whose only
dependency is this environment's torch, from the index that pip takes by default.
"""

from __future__ import annotations

import json
import tomllib
from argparse import ArgumentParser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

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


def wheel_bytes(lock: Path) -> dict[str, int]:
    """The size of the wheel of every package of a lock file that suits this Python."""
    suits, sizes = set(sys_tags()), {}
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]:
        for wheel in package.get("wheels", ()):
            if parse_wheel_filename(Path(wheel["url"]).name)[3] & suits:
                sizes[f"{package['name']} {package['version']}"] = int(wheel["size"])
    return sizes


def main() -> None:
    """Measure every extra, or read a lock file, and write the result beside that of the other."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=Path, help="a lock file of torch with CUDA")
    lock = parser.parse_args().lock
    path = RESULTS / "install.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    if lock is not None:
        result["cuda_wheels"] = wheel_bytes(lock)
        write_json(path, result)
        print(f"with CUDA: {sum(result['cuda_wheels'].values()) / 1e9:.2f} GB of wheels")
        return
    sizes = {extra: installed_bytes(extra) for extra in EXTRAS}
    result |= {"format": FORMAT, "environment": environment(), "bytes": sizes}
    write_json(path, result)
    for extra, size in sizes.items():
        print(f"{extra or 'no extra'}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
