"""The choice of the form: auto against the faster of two forms, forward and backward, over a grid.

    python -m benchmarks.choice                    # C++ forms, on a CPU with g++
    python -m benchmarks.choice --engine torch     # forms of PyTorch operations

A form that computes every pair of a query and a key takes a time quadratic in the length; the
chunked form's is linear, with a factor for monomials. ``auto`` chooses by the cost model, with the
speeds of this machine: they are measured first, unless ``--shipped`` asks for the built-in ones.
Expected before measuring: auto within 1.15 of the faster form in every cell.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import softmax_rnn as sr
from benchmarks import measure
from benchmarks.measure import ratios, seconds, summary
from benchmarks.recurrence import inputs, step
from softmax_rnn.ops import speeds
from softmax_rnn.ops.calibration import calibrate
from softmax_rnn.ops.cost import Sizes, chunked_cost, cost_of_pairs
from softmax_rnn.ops.forms.native_library import VARIABLE

GRID = ((256, 512, 1024, 4096, 16384), (8, 16, 32, 64), (1, 2, 4))
HEADS = 8
AT_MOST = 1.15
PATIENCE = 4.0  # seconds: a form predicted to take longer is not timed, unless it is the faster one
PAIRS = {"native": "native", "torch": "blocked"}


def cell(length: int, width: int, order: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row: the two forms and auto."""
    engine, pairs = arguments.engine, PAIRS[arguments.engine]
    spec, data = sr.variant("taylor", order=order), inputs(HEADS, length, width, "cpu")
    sizes = Sizes(spec, length, length, width, width, heads=HEADS, engine=engine)
    cost = {pairs: cost_of_pairs(sizes, engine), "chunked": chunked_cost(sizes)}
    # Nanoseconds a head, forward; the backward pass takes three times as long again.
    slow = {name: 4e-9 * HEADS * cost[name] > PATIENCE for name in cost}
    names = [name for name in cost if not slow[name] or cost[name] == min(cost.values())]
    # A form that fills the memory slows the next one: auto follows the form with less memory.
    names.sort(key=lambda name: cost[name], reverse=True)
    work = {name: step(name, spec, data) for name in [*names, "auto"]}
    times = seconds(work, arguments.rounds, shuffled=False)
    best = min(names, key=lambda name: median(times[name]))
    return {
        "heads": HEADS,
        "length": length,
        "width": width,
        "order": order,
        "seconds": {name: summary(times[name]) for name in times},
        "predicted": {name: 4e-9 * HEADS * each for name, each in cost.items()},
        "best": best,
        "auto_over_best": ratios(times["auto"], times[best]),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every cell of the grid."""
    if arguments.engine == "torch":
        os.environ[VARIABLE] = "0"
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    if not arguments.shipped:
        calibrate()
    result = measure.opening("choice", arguments)
    cells = [(t, d, n) for t in GRID[0] for d in GRID[1] for n in GRID[2]]
    rows = [cell(*each, arguments) for each in track(cells, description="auto", transient=True)]
    used = speeds.speeds(arguments.engine)
    return {
        **result,
        "dtype": "torch.float32",
        "nanoseconds": {name: work._asdict() for name, work in used._asdict().items()},
        "rows": rows,
        "verdicts": verdicts(rows),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as a table."""
    table = measure.table("T", "d", "order", "pairs, ms", "chunked, ms", "auto / best", "predicted")
    for row in result["rows"]:
        times, predicted = row["seconds"], row["predicted"]
        table.add_row(
            *(str(row[key]) for key in ("length", "width", "order")),
            *(
                f"{1e3 * times[name]['median']:.2f}" if name in times else "not waited for"
                for name in predicted
            ),
            measure.spread(row["auto_over_best"]),
            " / ".join(f"{1e3 * each:.2f}" for each in predicted.values()),
        )
    console.print(table)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The expectation with its measurement."""
    worst = max(row["auto_over_best"]["median"] for row in rows)
    what = f"auto over the faster form, worst of {len(rows)} cells"
    return [{"what": what, "found": worst, "limit": f"<= {AT_MOST}", "holds": worst <= AT_MOST}]


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=5)
    options.add_argument("--engine", choices=list(PAIRS), default="native")
    options.add_argument("--threads", type=int, help="by default PyTorch's")
    options.add_argument("--shipped", action="store_true", help="the built-in speeds")
    return measure.carry_out(measure.parsed(options, argv), run, show, itemgetter("verdicts"))


if __name__ == "__main__":
    raise SystemExit(main())
