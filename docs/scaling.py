"""Make the tables of scaling.md: ``python docs/scaling.py``. Estimates on paper; nothing is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from softmax_rnn._utils.files import write_text
from softmax_rnn.experiments.costs import GPUS, UTILISATION, Cost, cost
from softmax_rnn.report import markdown
from softmax_rnn.report.markdown import table
from softmax_rnn.training.config import RunConfig

PAGE, GPU = Path(__file__).parent / "scaling.md", "H100-80GB"
SIZES = ("small", "large", "deep")
# One direction of a GPU's links by the makers' data sheets, bytes a second.
RATES = {"in a node": 450e9, "between nodes": 50e9}
FLOAT32 = 4
# Times the weights that a step moves: DDP sums gradients; FSDP gathers weights twice and scatters
# gradients once.
TRAFFIC = {"DDP": 2, "FSDP": 3}


def _step(name: str) -> tuple[RunConfig, Cost]:
    """A size's configuration, and the cost of one step of it."""
    config = RunConfig.preset(name)
    return config, cost(replace(config, steps=1, schedule_steps=1, warmup_steps=0), GPU)


def sizes() -> str:
    """What a step of each size computes and holds, by the number of GPUs."""
    columns = ["size", "parameters", "FLOPs a step", "GPUs", "blocks each"]
    rows = []
    for name in SIZES:
        config, whole = _step(name)
        for gpus in (1, 4, 12, 36):
            blocks = config.batch_size // gpus
            share = cost(replace(config, batch_size=blocks), GPU)
            sharded = share.memory_bytes - 16 * share.parameters * (1 - 1 / gpus)
            memory = [f"{size / 2**30:,.1f} GiB" for size in (share.memory_bytes, sharded)]
            size = [name, f"{whole.parameters / 1e6:,.0f} M", f"{whole.operations:.2e}"]
            rows.append([*size, str(gpus), str(blocks), *memory])
    return table([*columns, "memory each, DDP", "FSDP"], rows)


def steps() -> str:
    """Milliseconds of computing and of communicating in a step of the paper's batch."""
    places = [f"{how} {place}" for how in TRAFFIC for place in RATES]
    rows = []
    for name in SIZES:
        _, one = _step(name)
        for gpus in (4, 12, 36):
            computing = one.operations / gpus / (GPUS[GPU] * UTILISATION)
            moved = one.parameters * FLOAT32 * (gpus - 1) / gpus
            links = [times * moved / rate for times in TRAFFIC.values() for rate in RATES.values()]
            cells = [f"{1000 * seconds:,.1f} ms" for seconds in (computing, *links)]
            rows.append([name, str(gpus), *cells])
    return table(["size", "GPUs", "computing", *places], rows)


def tokens() -> str:
    """Tokens a GPU and step below which communicating takes longer than computing."""
    speed = GPUS[GPU] * UTILISATION / 6  # parameters times tokens a second
    rows = [
        [how, *(f"{times * FLOAT32 / rate * speed:,.0f}" for rate in RATES.values())]
        for how, times in TRAFFIC.items()
    ]
    return table(["tokens a GPU and step", *RATES], rows)


def fill(page: str) -> str:
    """The page with every table made anew."""
    return markdown.fill(page, {"sizes": sizes(), "steps": steps(), "tokens": tokens()})


if __name__ == "__main__":
    write_text(PAGE, fill(PAGE.read_text(encoding="utf-8")))
