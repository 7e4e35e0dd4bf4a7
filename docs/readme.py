"""Fill the tables of README.md and howto/install.md: ``python docs/readme.py``.

Losses come from the pages of results/, speed and sizes from ``benchmarks/results``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from softmax_rnn._utils.files import write_text
from softmax_rnn.report import markdown

HERE = Path(__file__).parent
MEASURED = HERE.parent / "benchmarks" / "results"

# What README tells of the results: the page, its part, the variant, and what it is.
LOSSES = (
    ("figure4", "figure4", "norm", "Norm (`norm`), 1.5 million tokens"),
    ("gaps", "gaps", "norm", "Norm, 7.7 million tokens"),
    ("figure4", "figure4", "gate", "Gate (`gate`), 1.5 million tokens"),
    ("gaps", "gaps", "gate", "Gate, 7.7 million tokens"),
    ("figure5", "figure5", "taylor:1", "powers 0 and 1 (`taylor:1`), 1.5 million tokens"),
    ("figure5", "figure5", "taylor:2", "powers 0 to 2"),
    ("figure5", "figure5", "taylor:4", "powers 0 to 4"),
    ("figure5", "figure5", "taylor:10", "powers 0 to 10"),
    ("family", "family", "taylor:2", "powers 0 to 2, two layers, a million tokens"),
    ("family", "family", "taylor:2+decay", "the same with a forget gate (`taylor:2+decay`)"),
)
GAP = "minus softmax [95% interval]"

# What README tells of speed: the benchmark, its contestant, and what it is.
TIMES = (
    ("op", "norm", "`norm` / softmax by PyTorch"),
    ("op", "gate", "`gate`"),
    ("op", "taylor:10", "`taylor:10`"),
    ("op", "linear_elu", "`linear_elu`"),
    ("op", "materialised norm", "`norm`, N x N"),
    ("decode", "taylor:2", "a token after T tokens, `taylor:2` / Llama"),
)
LENGTHS = (512, 2048, 8192)
MACHINE = "xeon"  # the newest measurements

EXTRAS = {
    "": "the operation, states, streams and the layer",
    "hf": "the Llama, its caches and conversion",
    "train": "corpora, training and generation",
    "report": "comparisons, figures, claims and analysis",
    "all": "all of these, with Slurm (`cluster`), scikit-learn's digits (`digits`), "
    "`tensorboard`, `wandb`, GGUF files (`gguf`), peft (`convert`) and lm_eval (`evaluate`)",
}


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the first table in a text, by its columns."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def results() -> str:
    """Differences to softmax's test loss, as the pages of results have them."""
    table = []
    for name, part, variant, what in LOSSES:
        page = (HERE / "results" / f"{name}.md").read_text(encoding="utf-8")
        shown = page.partition(f"<!-- {part} -->")[2].partition("<!-- end -->")[0]
        (row,) = (each for each in rows(shown) if each["variant"] == f"`{variant}`")
        linked = f"{what} ([{part}](docs/results/{name}.md))"
        table.append((linked, row["seeds"], rounded(row[GAP])))
    return markdown.table(("attention", "seeds", "minus softmax"), table)


def rounded(gap: str) -> str:
    """A difference and its interval with three digits."""
    return re.sub(r"[+-]\d+\.\d+", lambda found: f"{float(found[0]):+.3f}", gap)


def measured(benchmark: str) -> dict[str, Any]:
    """The result of a benchmark on the machine of README."""
    path = MEASURED / f"{benchmark}-cpu-{MACHINE}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def speed() -> str:
    """Times relative to PyTorch's softmax, or to a decoding Llama."""
    table = []
    for benchmark, name, what in TIMES:
        ratios = {
            row["length"]: row["ratio"]["median"]
            for row in measured(benchmark)["rows"]
            if row["name"] == name and row["batch"] == 1
        }
        cells = (f"{ratios[T]:.2f}" if T in ratios else "not run" for T in LENGTHS)
        table.append((what, *cells))
    place = measured("op")["environment"]
    about = (
        "Time relative to PyTorch's softmax attention, forward and backward (B=1 H=8 D=64, "
        f"float32, {place['processor'].replace('(R)', '')}, {place['cores']} cores); "
        "the last row is of the small model that `make demo` trains:"
    )
    return about + "\n\n" + markdown.table(("", *(f"T = {T}" for T in LENGTHS)), table)


def sizes() -> str:
    """What the parts of the package take when they are installed."""
    table = []
    found = json.loads((MEASURED / "install.json").read_text(encoding="utf-8"))["bytes"]
    for extra, what in EXTRAS.items():
        command = f"pip install '.[{extra}]'" if extra else "pip install ."
        table.append((f"`{command}`", what, f"{found[extra] / 1e9:.1f} GB"))
    return markdown.table(("command", "adds", "installed"), table, left=2)


PAGES = {
    HERE.parent / "README.md": {"results": results, "speed": speed},
    HERE / "howto" / "install.md": {"sizes": sizes},
}


def fill(path: Path) -> str:
    """A page with every table replaced."""
    return markdown.fill(
        path.read_text(encoding="utf-8"), {name: make() for name, make in PAGES[path].items()}
    )


if __name__ == "__main__":
    for path in PAGES:
        write_text(path, fill(path))
