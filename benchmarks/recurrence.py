"""Finite series: the chunked form, the blocked form, and running states at every position.

    python -m benchmarks.recurrence

Expected before measuring: the plain way makes a state of ``monomials x values`` at every position,
so that memory traffic alone costs it some 10 to 100 times the products it needs; the chunked form
makes one a chunk. Its time is linear in the length; the blocked form's is quadratic, without the
monomials, and wins below the crossover that the cost model gives. A stream holds one state.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import softmax_rnn as sr
from benchmarks.measure import Work, peak_extra_bytes, ratios, seconds, summary
from softmax_rnn.cost import blocked_cost, chunked_cost
from softmax_rnn.files import write_json
from softmax_rnn.training.environment import environment

# (heads, length, width, order, speed-up expected); memory at most 1/20 at each.
AGAINST_RUNNING_STATES = ((4, 2048, 8, 4, 8.0), (4, 2048, 16, 2, 12.0), (1, 1024, 64, 2, 100.0))
GROWTH = (4096, 16384, 4.5)
GRID = ((256, 1024, 4096, 16384), (8, 16, 64), (1, 2, 4))
AUTO_AT_MOST = 1.2
# The slower form is not waited for beyond this many predicted seconds a step.
PATIENCE = 3.0
STREAM = {"heads": 4, "width": 8, "order": 4, "tokens": 1_000_000, "piece": 1000}


def inputs(heads: int, length: int, width: int) -> list[Tensor]:
    """q, k, v, all [1, heads, length, width]."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, width, generator=draw) for _ in range(3)]


def running_states(width: int, order: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The plain causal way: monomials by their indices, states by a cumulative sum."""
    powers = []
    for degree in range(order + 1):
        indices = list(combinations_with_replacement(range(width), degree))
        repeats = [math.prod(math.factorial(i.count(j)) for j in set(i)) for i in indices]
        weights = 1.0 / torch.tensor(repeats, dtype=torch.float64)
        powers.append((torch.tensor(indices, dtype=torch.long).view(len(indices), degree), weights))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q / math.sqrt(width)
        numerator, denominator = torch.zeros_like(v), torch.zeros_like(v[..., :1])
        for indices, weights in powers:
            of_q = q[..., indices].prod(-1) * weights.to(q.dtype)
            of_k = k[..., indices].prod(-1)
            states = (of_k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)
            numerator += torch.einsum("bhtm,bhtme->bhte", of_q, states)
            denominator += (of_q * of_k.cumsum(-2)).sum(-1, keepdim=True)
        return numerator / denominator

    return attend


def chunked(spec: sr.AttentionSpec) -> Callable[..., Tensor]:
    return lambda q, k, v: sr.attention(q, k, v, spec, form="chunked")


def check(attend: Callable[..., Tensor], spec: sr.AttentionSpec, data: list[Tensor]) -> float:
    """The relative error against dense in float64; ends the benchmark if it is large."""
    with torch.no_grad():
        q, k, v = data
        expected = sr.attention(q.double(), k.double(), v.double(), spec, form="dense")
        error = float((attend(q, k, v) - expected).norm() / expected.norm())
    if not error <= 1e-5:
        raise SystemExit(f"Not timed: relative error {error:.1e} for {spec}.")
    return error


def against_running_states(rounds: int) -> list[dict[str, Any]]:
    """Forward, time and peak memory, of the chunked form and of running states."""
    rows = []
    for heads, length, width, order, expected in track(
        AGAINST_RUNNING_STATES, description="running states", transient=True
    ):
        spec, data = sr.variant("taylor", order=order), inputs(heads, length, width)
        ways = {"running states": running_states(width, order), "chunked": chunked(spec)}
        errors = {name: check(attend, spec, data) for name, attend in ways.items()}
        work: dict[str, Work] = {name: partial(attend, *data) for name, attend in ways.items()}
        with torch.no_grad():
            times = seconds(work, rounds)
            peaks = {name: peak_extra_bytes(run) for name, run in work.items()}
        rows.append(
            {
                "heads": heads,
                "length": length,
                "width": width,
                "order": order,
                "errors": errors,
                "seconds": {name: summary(times[name]) for name in times},
                "speedup": ratios(times["running states"], times["chunked"]),
                "expected_speedup": expected,
                "peak_extra_bytes": peaks,
                "memory_ratio": peaks["running states"] / peaks["chunked"],
            }
        )
    return rows


def step(form: str, spec: sr.AttentionSpec, data: list[Tensor]) -> Work:
    """Forward and backward."""
    q, k, v = (x.clone().requires_grad_() for x in data)
    upstream = torch.ones_like(v)

    def run() -> object:
        return torch.autograd.grad(sr.attention(q, k, v, spec, form=form), (q, k, v), upstream)

    return run


def growth(rounds: int) -> dict[str, Any]:
    """Chunked, forward and backward: time from a length to four times it."""
    short, long, at_most = GROWTH
    spec = sr.variant("taylor", order=2)
    work = {str(length): step("chunked", spec, inputs(4, length, 16)) for length in (short, long)}
    times = seconds(work, rounds)
    return {
        "heads": 4,
        "width": 16,
        "order": 2,
        "seconds": {name: summary(times[name]) for name in times},
        "ratio": ratios(times[str(long)], times[str(short)]),
        "expected_at_most": at_most,
    }


def dispatch(rounds: int, heads: int = 2) -> list[dict[str, Any]]:
    """Auto against the better of blocked and chunked, forward and backward, over a grid."""
    lengths, widths, orders = GRID
    cells = [(t, d, n) for t in lengths for d in widths for n in orders]
    rows = []
    for length, width, order in track(cells, description="auto", transient=True):
        spec, data = sr.variant("taylor", order=order), inputs(heads, length, width)
        sizes = (spec, length, length, width, width)
        cost = {
            "blocked": blocked_cost(*sizes, heads=heads),
            "chunked": chunked_cost(*sizes, heads=heads),
        }
        # Nanoseconds a head, forward; the backward pass takes three times as long again.
        slow = {name: 4e-9 * heads * cost[name] > PATIENCE for name in cost}
        names = [name for name in cost if not slow[name] or cost[name] == min(cost.values())]
        # What follows a form that fills the memory pays for it: auto comes after the leaner one.
        names.sort(key=lambda name: cost[name], reverse=True)
        times = seconds({name: step(name, spec, data) for name in [*names, "auto"]}, rounds)
        best = min(names, key=lambda name: median(times[name]))
        rows.append(
            {
                "heads": heads,
                "length": length,
                "width": width,
                "order": order,
                "seconds": {name: summary(times[name]) for name in times},
                "predicted": cost,
                "best": best,
                "auto_over_best": ratios(times["auto"], times[best]),
                "crossover": sr.crossover(spec, width, width, heads),
            }
        )
    return rows


def stream() -> dict[str, Any]:
    """A million tokens, a piece at a time: resident memory, time at both ends, the last window."""
    heads, width, piece = STREAM["heads"], STREAM["width"], STREAM["piece"]
    spec = sr.variant("taylor", order=STREAM["order"])
    pieces, warm, window = STREAM["tokens"] // piece, 20, 20
    draw = torch.Generator().manual_seed(1)
    flow, times, process = sr.Stream(spec), [], psutil.Process()
    drawn = torch.empty(3, 1, heads, piece, width)
    before, largest = 0, 0
    for index in track(range(pieces), description="stream", transient=True):
        drawn.normal_(generator=draw)
        start = perf_counter()
        out = flow(*drawn)
        times.append(perf_counter() - start)
        if index == warm:
            before = process.memory_info().rss
        largest = max(largest, process.memory_info().rss)
    grown = largest - before
    draw.manual_seed(1)
    everything = torch.empty(3, 1, heads, pieces * piece, width)
    for index in range(pieces):
        everything[:, :, :, index * piece : (index + 1) * piece] = drawn.normal_(generator=draw)
    with torch.no_grad():
        q, k, v = everything
        expected = sr.attention(q, k, v, spec, form="chunked")[:, :, -piece:]
    first, last = times[warm : warm + window], times[-window:]
    return {
        **STREAM,
        "state_bytes": flow.nbytes,
        "resident_growth_bytes": grown,
        "seconds_per_piece_first": summary(first),
        "seconds_per_piece_last": summary(last),
        "last_over_first": median(last) / median(first),
        "largest_difference_to_chunked": float((out - expected).abs().max()),
    }


def one_token(rounds: int = 200) -> list[dict[str, Any]]:
    """A token at a time: milliseconds a token, whatever came before."""
    rows = []
    for heads, width, order in ((4, 8, 4), (4, 32, 2), (8, 64, 2)):
        spec = sr.variant("taylor", order=order)
        flow = sr.Stream(spec)
        q, k, v = inputs(heads, rounds + 20, width)
        times = []
        for token in range(rounds + 20):
            here = slice(token, token + 1)
            start = perf_counter()
            flow(q[:, :, here], k[:, :, here], v[:, :, here])
            times.append(perf_counter() - start)
        rows.append(
            {
                "heads": heads,
                "width": width,
                "order": order,
                "state_bytes": flow.nbytes,
                "seconds": summary(times[20:]),
            }
        )
    return rows


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every expectation, with what was found."""
    answers = []

    def expect(what: str, found: float, holds: bool, expected: str) -> None:
        answers.append({"what": what, "found": found, "expected": expected, "holds": bool(holds)})

    for row in result["against_running_states"]:
        what = "H={heads} T={length} d={width} order {order}".format(**row)
        speedup, wanted = row["speedup"]["median"], row["expected_speedup"]
        expect(f"speed-up over running states, {what}", speedup, speedup >= wanted, f">= {wanted}")
        memory = row["memory_ratio"]
        expect(f"their peak memory over ours, {what}", memory, memory >= 20, ">= 20")
    found, at_most = result["growth"]["ratio"]["median"], result["growth"]["expected_at_most"]
    expect("time of T=16384 over T=4096, chunked", found, found <= at_most, f"<= {at_most}")
    worst = max(row["auto_over_best"]["median"] for row in result["dispatch"])
    expect("auto over the better form, worst cell", worst, worst <= AUTO_AT_MOST, "<= 1.2")
    flow = result["stream"]
    grown = flow["resident_growth_bytes"] / 1e6
    expect("resident growth over 1,000,000 tokens, MB", grown, grown < 50, "< 50")
    ratio = flow["last_over_first"]
    expect("time of the last 1,000 tokens over the first", ratio, ratio <= 1.1, "<= 1.1")
    error = flow["largest_difference_to_chunked"]
    expect("stream against chunked, last window", error, error <= 1e-4, "<= 1e-4")
    return answers


def show(result: dict[str, Any], console: Console) -> None:
    """The rows and the verdicts as tables."""
    table = Table("H", "T", "d", "order", box=box.SIMPLE_HEAD, title="forward, milliseconds")
    for column in ("running states", "chunked", "speed-up [quartiles]", "memory ratio"):
        table.add_column(column, justify="right")
    for row in result["against_running_states"]:
        times, ratio = row["seconds"], row["speedup"]
        table.add_row(
            *(str(row[key]) for key in ("heads", "length", "width", "order")),
            *(f"{1e3 * times[name]['median']:.1f}" for name in ("running states", "chunked")),
            f"{ratio['median']:.1f} [{ratio['low']:.1f}, {ratio['high']:.1f}]",
            f"{row['memory_ratio']:.0f}",
        )
    console.print(table)
    table = Table("T", "d", "order", box=box.SIMPLE_HEAD, title="forward and backward, ms")
    for column in ("blocked", "chunked", "auto / better", "crossover"):
        table.add_column(column, justify="right")
    for row in result["dispatch"]:
        times = row["seconds"]
        cells = (
            f"{1e3 * times[name]['median']:.1f}" if name in times else "not waited for"
            for name in ("blocked", "chunked")
        )
        table.add_row(
            *(str(row[key]) for key in ("length", "width", "order")),
            *cells,
            f"{row['auto_over_best']['median']:.2f}",
            f"{row['crossover']:,}",
        )
    console.print(table)
    for row in result["one_token"]:
        console.print(
            "one token, H={heads} d={width} order {order}: ".format(**row)
            + f"{1e3 * row['seconds']['median']:.2f} ms, state {row['state_bytes'] / 1024:,.0f} KiB"
        )
    for answer in result["verdicts"]:
        mark = "holds" if answer["holds"] else "FAILS"
        console.print(f"{mark}  {answer['what']}: {answer['found']:.3g} ({answer['expected']})")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    result: dict[str, Any] = {
        "benchmark": "recurrence",
        "command": " ".join(["python -m benchmarks.recurrence", *sys.argv[1:]]),
        "against_running_states": against_running_states(arguments.rounds),
        "growth": growth(arguments.rounds),
        "dispatch": dispatch(max(5, arguments.rounds - 2)),
        "one_token": one_token(),
        "stream": stream(),
        "environment": environment(),
    }
    result["verdicts"] = verdicts(result)
    show(result, console)
    out = arguments.out or Path(__file__).parent / "results" / "recurrence-cpu.json"
    write_json(out, result)
    console.print(f"Written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
