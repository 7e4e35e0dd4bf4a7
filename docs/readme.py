"""Fill the tables of README.md and howto/install.md: ``python docs/readme.py``.

Losses come from the pages of results/, speed and sizes from ``benchmarks/results``. Of README's
other numbers ``unchecked`` tells those that are not what these files, or the package itself, say.
"""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import yaml

from softmax_rnn._utils.files import write_text
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.report import markdown
from softmax_rnn.training.config import RunConfig

HERE = Path(__file__).parent
MEASURED = HERE.parent / "benchmarks" / "results"

# What README tells of the results: the page and its part, the variant, and what it is.
LOSSES = (
    ("figure4", "norm", "Norm (`norm`), {tokens}"),
    ("gaps", "norm", "Norm, {tokens}"),
    ("figure4", "gate", "Gate (`gate`), {tokens}"),
    ("gaps", "gate", "Gate, {tokens}"),
    ("figure5", "taylor:1", "powers 0 and 1 (`taylor:1`), {tokens}"),
    ("figure5", "taylor:2", "powers 0 to 2"),
    ("figure5", "taylor:4", "powers 0 to 4"),
    ("figure5", "taylor:10", "powers 0 to 10"),
    ("family", "taylor:2", "powers 0 to 2, {layers} layers, {tokens}"),
    ("family", "taylor:2+decay", "the same with a forget gate (`taylor:2+decay`)"),
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


def part(name: str) -> str:
    """The table of a page of results, and the scale below it."""
    page = (HERE / "results" / f"{name}.md").read_text(encoding="utf-8")
    return page.partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]


def gap(name: str, variant: str) -> dict[str, str]:
    """A variant's row in such a table."""
    (row,) = (each for each in rows(part(name)) if each["variant"] == f"`{variant}`")
    return row


def trained(name: str) -> RunConfig:
    """How the models of a page were trained."""
    (scale,) = re.findall(r"^Scale (\w+),", part(name), flags=re.M)
    return SCALES[scale].config(FIGURES[name].panels[0], "softmax", 0, {})


def tokens(name: str) -> str:
    """How many tokens they saw."""
    config = trained(name)
    return f"{config.steps * config.tokens_per_step / 1e6:.1f} million tokens"


def results() -> str:
    """Differences to softmax's test loss, as the pages of results have them."""
    table = []
    for name, variant, what in LOSSES:
        row = gap(name, variant)
        about = what.format(tokens=tokens(name), layers=trained(name).num_layers)
        linked = f"{about} ([{name}](docs/results/{name}.md))"
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
    found = measured("op")
    place, row = found["environment"], found["rows"][0]
    about = (
        "Time relative to PyTorch's softmax attention, forward and backward "
        f"(B={row['batch']} H={row['heads']} D={row['width']}, {found['dtype'].split('.')[1]}, "
        f"{place['processor'].replace('(R)', '')}, {place['cores']} cores); "
        "the last row is of the small model that `make demo` trains:"
    )
    return about + "\n\n" + markdown.table(("", *(f"T = {T}" for T in LENGTHS)), table)


def sizes() -> str:
    """What the parts of the package take when they are installed."""
    table = []
    found = installed()
    for extra, what in EXTRAS.items():
        command = f"pip install '.[{extra}]'" if extra else "pip install ."
        table.append((f"`{command}`", what, gigabytes(found["bytes"][extra])))
    wheels = found["cuda_wheels"]
    (torch,) = (name for name in wheels if name.startswith("torch "))
    return f"""{markdown.table(("command", "adds", "installed"), table, left=2)}

The sizes are those of the files, with PyTorch's build for CPUs, and without the bytecode that
Python adds. **On Linux pip takes the build with CUDA** unless PyTorch is there already: {torch} and
what it needs are then {gigabytes(sum(wheels.values()))} of wheels to download, which are larger
once they are installed ({len(wheels)} packages on x86-64)."""


def installed() -> dict[str, Any]:
    """The sizes of the package's parts, and of the wheels of PyTorch with CUDA."""
    return dict(json.loads((MEASURED / "install.json").read_text(encoding="utf-8")))


def gigabytes(size: int) -> str:
    """A size in GB."""
    return f"{size / 1e9:.1f} GB"


PAGES = {
    HERE.parent / "README.md": {"results": results, "speed": speed},
    HERE / "howto" / "install.md": {"sizes": sizes},
}


def phrases() -> list[str]:
    """What README says in numbers outside its tables, as the files say it."""
    about = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((HERE.parent / "CITATION.cff").read_text(encoding="utf-8"))
    paper = citation["preferred-citation"]
    names = [author["family-names"] for author in paper["authors"]]
    # Gaps are those of the same models with more tokens; the family's are smaller.
    with tarfile.open(HERE / "results" / "records" / "figure4-best.tar.xz") as records:
        summaries = [records.extractfile(file) for file in records if "summary" in file.name]
        parameters = [json.load(file)["parameters"] for file in summaries if file is not None]
    family = (HERE / "results" / "family.md").read_text(encoding="utf-8")
    (crossing,) = re.findall(
        r"softmax\s+overtakes\s+it\s+(between\s[\d.]+\sand\s[\d.]+\smillion)", family
    )
    low, high = map(float, re.findall(r"[+-]\d\.\d+", gap("figure5", "taylor:10")[GAP])[1:])
    early = float(gap("family", "taylor:2+decay")[GAP].split()[0])
    sizes = installed()
    return [
        f"([{' and '.join(names)}, {paper['year']}]({paper['url']}))",
        f"Python {about['requires-python'].removeprefix('>=')} or newer",
        f"(up to {max(parameters) / 1e6:.1f} million parameters)",
        f"with {re.findall(r'[0-9]+%', GAP)[0]} intervals",
        f"those to 10 are {'as' if low <= 0 <= high else 'not as'} good as all",
        f"is {'ahead' if early < 0 else 'behind'} after {tokens('family')}",
        f"overtakes it {crossing} tokens",
        f"downloads {gigabytes(sum(sizes['cuda_wheels'].values()))}",
        f"takes {gigabytes(sizes['bytes'][''])}",
        f"journal = {{{paper['journal']}}}",
        f"year    = {{{paper['year']}}}",
        about["license"].replace("-", " "),
    ]


def unchecked(readme: str) -> list[str]:
    """The phrases that README has not, and its other numbers outside of tables, code and links."""
    text = re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", "", readme, flags=re.S)
    text = re.sub(r"```python\n.*?```", "", text, flags=re.S)
    # Of a command only what is said about it.
    text = re.sub(
        r"```bash\n(.*?)```", lambda block: re.sub(r"(?m)^[^#\n]*", "", block[1]), text, flags=re.S
    )
    text = re.sub(r"\s+", " ", text)
    missing = []
    for phrase in phrases():
        phrase = re.sub(r"\s+", " ", phrase)
        if phrase in text:
            text = text.replace(phrase, "")
        else:
            missing.append(phrase)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return missing + re.findall(r"\b\d[\d.,]*|\b(?:hundred|thousand|million|billion)s?\b", text)


def fill(path: Path) -> str:
    """A page with every table replaced."""
    return markdown.fill(
        path.read_text(encoding="utf-8"), {name: make() for name, make in PAGES[path].items()}
    )


if __name__ == "__main__":
    for path in PAGES:
        write_text(path, fill(path))
