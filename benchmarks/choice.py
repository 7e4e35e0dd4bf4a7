"""The choice of the form: auto against the fastest form, forward and backward, over a grid.

    python -m benchmarks.choice                    # with C++, on a CPU with g++
    python -m benchmarks.choice --engine torch     # PyTorch's operations alone
    python -m benchmarks.choice --short            # the lengths up to 256 alone

Forms that compute every pair of a query and a key take a time quadratic in the length; the
chunked form's is linear, with a factor for monomials. ``auto`` chooses by the rule of
``ops/work.py``. Up to 256 tokens, calling operations takes most of the time.
Expected before measuring: auto within 1.15 of the fastest form in every cell.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
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
from softmax_rnn.ops.forms.cpu.cpp import VARIABLE
from softmax_rnn.ops.work import Sizes, chunks_pay

SHORT = ((16, 32, 64, 128, 256), (16, 64))
SPECS = {
    **{name: sr.variant(name) for name in ("softmax", "norm", "length", "linear_elu", "taylor:2")},
    "clamped": sr.AttentionSpec(clamp=5.0),
    "window:32": sr.AttentionSpec(window=32),
}
LONG = ((256, 512, 1024, 4096, 16384), (8, 16, 32, 64), (1, 2, 4))
HEADS = 8
AT_MOST = 1.15
MOST = 2e10  # multiply-adds in a head: a form that needs more is not waited for
NEVER = ("recurrent",)  # a state per token


def cells(short: bool) -> Iterator[tuple[str, sr.AttentionSpec, int, int]]:
    """What is timed: a name, its spec, a length and a width."""
    for name, spec in SPECS.items():
        for length in SHORT[0]:
            for width in SHORT[1]:
                yield name, spec, length, width
    if short:
        return
    for length in LONG[0]:
        for width in LONG[1]:
            for order in LONG[2]:
                yield f"taylor:{order}", sr.variant("taylor", order=order), length, width


def candidates(spec: sr.AttentionSpec, length: int, width: int) -> list[str]:
    """The forms that are timed beside auto."""
    names = [name for name in sr.forms(spec) if name not in NEVER and name != "triton"]
    if length <= SHORT[0][-1]:
        return [name for name in names if name != "chunked" or width <= 16]
    # Other forms of pairs are slower on long sequences.
    pairs = next(name for name in names if name != "chunked")
    sizes, rows = Sizes(spec, length, length, width, width), sr.state_size(spec, width, 1)
    work = {pairs: length**2 * width, "chunked": 2 * length * rows * width}
    wanted = "chunked" if chunks_pay(sizes) else pairs
    # A form that fills the memory slows the next one: auto follows the form with less memory.
    names = sorted(work, key=lambda name: work[name], reverse=True)
    return [name for name in names if work[name] <= MOST or name == wanted]


def fits(once: measure.Work) -> bool:
    """Whether the memory suffices for a form; those for which it does not are not timed."""
    try:
        once()
    except MemoryError:
        return False
    return True


def cell(
    name: str, spec: sr.AttentionSpec, length: int, width: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One row: the forms and auto."""
    data = inputs(HEADS, length, width, "cpu")
    tried = {form: step(form, spec, data) for form in candidates(spec, length, width)}
    work = {form: once for form, once in tried.items() if fits(once)}
    names = [*work]
    work["auto"] = step("auto", spec, data)
    rounds = arguments.rounds * (10 if length <= SHORT[0][-1] else 1)
    times = seconds(work, rounds, shuffled=length <= SHORT[0][-1])
    best = min(names, key=lambda form: median(times[form]))
    return {
        "heads": HEADS,
        "spec": name,
        "length": length,
        "width": width,
        "seconds": {form: summary(times[form]) for form in times},
        "best": best,
        "auto_over_best": ratios(times["auto"], times[best]),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every cell of the grid."""
    if arguments.engine == "torch":
        os.environ[VARIABLE] = "0"
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    result = measure.opening("choice", arguments)
    every = [*cells(arguments.short)]
    rows = [cell(*each, arguments) for each in track(every, description="auto", transient=True)]
    return {**result, "dtype": "torch.float32", "rows": rows, "verdicts": verdicts(rows)}


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as a table."""
    table = measure.table("spec", "T", "d", "forms, ms", "auto / best")
    for row in result["rows"]:
        forms = ", ".join(
            f"{form} {1e3 * time['median']:.2f}"
            for form, time in sorted(row["seconds"].items(), key=lambda item: item[1]["median"])
        )
        sizes = (str(row[key]) for key in ("spec", "length", "width"))
        table.add_row(*sizes, forms, measure.spread(row["auto_over_best"]))
    console.print(table)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The expectation with its measurement."""
    worst = max(row["auto_over_best"]["median"] for row in rows)
    what = f"auto over the fastest form, worst of {len(rows)} cells"
    return [{"what": what, "found": worst, "limit": f"<= {AT_MOST}", "holds": worst <= AT_MOST}]


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=5)
    options.add_argument("--engine", choices=["native", "torch"], default="native")
    options.add_argument("--threads", type=int, help="by default PyTorch's")
    options.add_argument("--short", action="store_true", help="up to 256 tokens alone")
    return measure.carry_out(measure.parsed(options, argv), run, show, itemgetter("verdicts"))


if __name__ == "__main__":
    raise SystemExit(main())
