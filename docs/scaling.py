"""Make the tables of scaling.md: ``python docs/scaling.py``. They are estimates; nothing is run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from softmax_rnn._utils.files import write_text
from softmax_rnn.experiments.costs import GPUS, UTILISATION, Cost, cost
from softmax_rnn.ops.monomials import state_size
from softmax_rnn.ops.variants import variant
from softmax_rnn.report import markdown
from softmax_rnn.report.markdown import table
from softmax_rnn.training.config import RunConfig

PAGE, GPU = Path(__file__).parent / "scaling.md", "H100-80GB"
SIZES = ("small", "large", "deep")
# Bytes per second of a GPU's links in one direction, from the data sheets.
RATES = {"in a node": 450e9, "between nodes": 50e9}
FLOAT32 = 4
FLOAT16 = 2
# Attention layers with 16 heads of width 64, as in the table of context parallelism.
HEADS, WIDTH = 16, 64
PASSED = {"linear_elu": "linear_elu", "order 2": "taylor:2", "softmax": "softmax"}
# Data that a step sends, as a multiple of the weights: DDP sums gradients; FSDP gathers weights
# twice and scatters gradients once.
TRAFFIC = {"DDP": 2, "FSDP": 3}


def _step(name: str) -> tuple[RunConfig, Cost]:
    """A size's configuration, and the cost of one of its steps."""
    config = RunConfig.preset(name)
    return config, cost(replace(config, steps=1, schedule_steps=1, warmup_steps=0), GPU)


def sizes() -> str:
    """Operations and memory of a step of each size, by the number of GPUs."""
    columns = ["size", "parameters", "FLOPs per step", "GPUs", "blocks per GPU"]
    rows = []
    for name in SIZES:
        config, total = _step(name)
        for gpus in (1, 4, 12, 36):
            blocks = config.batch_size // gpus
            share = cost(replace(config, batch_size=blocks), GPU)
            sharded = share.memory_bytes - 16 * share.parameters * (1 - 1 / gpus)
            memory = [f"{size / 2**30:,.1f} GiB" for size in (share.memory_bytes, sharded)]
            size = [name, f"{total.parameters / 1e6:,.0f} M", f"{total.operations:.2e}"]
            rows.append([*size, str(gpus), str(blocks), *memory])
    return table([*columns, "memory per GPU, DDP", "FSDP"], rows)


def steps() -> str:
    """Milliseconds of computation and of communication in a step of the paper's batch."""
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
    return table(["size", "GPUs", "computation", *places], rows)


def tokens() -> str:
    """Tokens per GPU and step below which communication takes longer than computation."""
    speed = GPUS[GPU] * UTILISATION / 6  # parameters times tokens a second
    rows = [
        [how, *(f"{times * FLOAT32 / rate * speed:,.0f}" for rate in RATES.values())]
        for how, times in TRAFFIC.items()
    ]
    return table(["tokens per GPU and step", *RATES], rows)


def contexts() -> str:
    """What a GPU receives and holds in a layer, if a sequence is spread over GPUs."""
    rows = []
    for length, gpus in ((2**15, 2), (2**15, 8), (2**17, 8), (2**17, 64), (2**20, 64)):
        for shown, name in PASSED.items():
            spec = variant(name)
            finite = spec.order is not None
            if finite:
                held = state_size(spec, WIDTH, WIDTH) * FLOAT32
                received = held * (1 + math.ceil(math.log2(gpus)))  # rounds of a scan
                multiplied = 4 * length * state_size(spec, WIDTH, WIDTH)  # keys and queries
            else:
                received = held = length * 2 * WIDTH * FLOAT16 * (gpus - 1) // gpus
                multiplied = 2 * length * length * WIDTH  # half of the pairs, both products
            computing = HEADS * multiplied / gpus / (GPUS[GPU] * UTILISATION)
            times = [computing, *(HEADS * received / rate for rate in RATES.values())]
            what = "states" if finite else "keys"
            rows.append(
                [
                    *(f"{length:,}", str(gpus), shown, what),
                    *(f"{HEADS * size / 2**20:,.1f} MiB" for size in (held, received)),
                    *(f"{1000 * seconds:,.2f} ms" for seconds in times),
                ]
            )
    columns = ["length", "GPUs", "attention", "passed", "held", "received", "computation"]
    return table([*columns, *(f"communication {place}" for place in RATES)], rows)


def fill(page: str) -> str:
    """The page with every table replaced."""
    tables = {"sizes": sizes(), "steps": steps(), "tokens": tokens(), "contexts": contexts()}
    return markdown.fill(page, tables)


if __name__ == "__main__":
    write_text(PAGE, fill(PAGE.read_text(encoding="utf-8")))
