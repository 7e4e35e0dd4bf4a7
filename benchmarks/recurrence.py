"""Finite series: the chunked form, the blocked form, and running states at every position.

    python -m benchmarks.recurrence                  # one core of a CPU
    python -m benchmarks.recurrence --device cuda

Expected before measuring: the simple method stores a state of ``monomials x values`` for every
position, so memory traffic alone takes 10 to 100 times as long as the necessary products. The
chunked form stores one state per chunk, and its time is linear in the length. The time of the
blocked form is quadratic but has no factor for monomials (benchmarks.choice compares them). A
stream stores one state.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement
from mmap import PAGESIZE
from operator import itemgetter
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import softmax_rnn as sr
from benchmarks import measure
from benchmarks.measure import Work, peak_extra_bytes, ratios, seconds, summary, synchronize

# (heads, length, width, order, speed-up expected); memory at most 1/20 at each.
AGAINST_RUNNING_STATES = ((4, 2048, 8, 4, 8.0), (4, 2048, 16, 2, 12.0), (1, 1024, 64, 2, 100.0))
GROWTH = (4096, 16384, 4.5)
STREAM = {"heads": 4, "width": 8, "order": 4, "tokens": 1_000_000, "piece": 1000}
TOKENS = 200  # one at a time


def inputs(heads: int, length: int, width: int, device: str) -> list[Tensor]:
    """q, k, v, all [1, heads, length, width]."""
    draw = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, heads, length, width, generator=draw) for _ in range(3))
    return [x.to(device) for x in drawn]


def running_states(
    width: int, order: int, device: str
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The simple causal method: monomials by index, states by a cumulative sum."""
    powers = []
    for degree in range(order + 1):
        indices = list(combinations_with_replacement(range(width), degree))
        repeats = [math.prod(math.factorial(i.count(j)) for j in set(i)) for i in indices]
        weights = 1.0 / torch.tensor(repeats, dtype=torch.float64)
        places = torch.tensor(indices, dtype=torch.long).view(len(indices), degree)
        powers.append((places.to(device), weights.to(device)))

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
    """The relative error against dense in float64; exits if it is large."""
    with torch.no_grad():
        q, k, v = data
        expected = sr.attention(q.double(), k.double(), v.double(), spec, form="dense")
        error = float((attend(q, k, v) - expected).norm() / expected.norm())
    if not error <= 1e-5:
        raise SystemExit(f"Not timed: relative error {error:.1e} for {spec}.")
    return error


def against_running_states(rounds: int, device: str) -> list[dict[str, Any]]:
    """Forward, time and peak memory, of the chunked form and of running states."""
    rows = []
    for heads, length, width, order, expected in track(
        AGAINST_RUNNING_STATES, description="running states", transient=True
    ):
        spec, data = sr.variant("taylor", order=order), inputs(heads, length, width, device)
        ways = {"running states": running_states(width, order, device), "chunked": chunked(spec)}
        errors = {name: check(attend, spec, data) for name, attend in ways.items()}
        work: dict[str, Work] = {name: partial(attend, *data) for name, attend in ways.items()}
        with torch.no_grad():
            times = seconds(work, rounds, device=device)
            peaks = {name: peak_extra_bytes(run, device) for name, run in work.items()}
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
                # Of tiny inputs it may be less than a page, which reads as 0.
                "memory_ratio": peaks["running states"] / max(peaks["chunked"], PAGESIZE),
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


def growth(rounds: int, device: str) -> dict[str, Any]:
    """Chunked, forward and backward: how time grows from one length to four times that length."""
    short, long, at_most = GROWTH
    spec = sr.variant("taylor", order=2)
    work = {
        str(length): step("chunked", spec, inputs(4, length, 16, device))
        for length in (short, long)
    }
    times = seconds(work, rounds, device=device)
    return {
        "heads": 4,
        "width": 16,
        "order": 2,
        "seconds": {name: summary(times[name]) for name in times},
        "ratio": ratios(times[str(long)], times[str(short)]),
        "expected_at_most": at_most,
    }


def stream(device: str) -> dict[str, Any]:
    """A stream of a million tokens: memory growth, time at both ends, error of the last window."""
    heads, width, piece = STREAM["heads"], STREAM["width"], STREAM["piece"]
    spec = sr.variant("taylor", order=STREAM["order"])
    pieces, warm, window = STREAM["tokens"] // piece, 20, 20
    draw = torch.Generator().manual_seed(1)
    flow, times, process = sr.Stream(spec), [], psutil.Process()

    def held() -> int:
        if device == "cuda":
            return torch.cuda.memory_allocated()
        resident: int = process.memory_info().rss
        return resident

    drawn = torch.empty(3, 1, heads, piece, width)
    before, largest = 0, 0
    for index in track(range(pieces), description="stream", transient=True):
        given = drawn.normal_(generator=draw).to(device)
        start = perf_counter()
        out = flow(*given)
        synchronize(device)
        times.append(perf_counter() - start)
        if index == warm:
            before = held()
        largest = max(largest, held())
    grown = largest - before
    draw.manual_seed(1)
    everything = torch.empty(3, 1, heads, pieces * piece, width)
    for index in range(pieces):
        everything[:, :, :, index * piece : (index + 1) * piece] = drawn.normal_(generator=draw)
    with torch.no_grad():
        q, k, v = everything.to(device)
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


def one_token(device: str) -> list[dict[str, Any]]:
    """Milliseconds per token when tokens arrive one at a time."""
    rows = []
    for heads, width, order in ((4, 8, 4), (4, 32, 2), (8, 64, 2)):
        spec = sr.variant("taylor", order=order)
        flow = sr.Stream(spec)
        q, k, v = inputs(heads, TOKENS + 20, width, device)
        times = []
        for token in range(TOKENS + 20):
            here = slice(token, token + 1)
            start = perf_counter()
            flow(q[:, :, here], k[:, :, here], v[:, :, here])
            synchronize(device)
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
    """Every expectation with its measurement."""
    answers = []

    def expect(what: str, found: float, holds: bool, limit: str) -> None:
        answers.append({"what": what, "found": found, "limit": limit, "holds": bool(holds)})

    for row in result["against_running_states"]:
        what = "H={heads} T={length} d={width} order {order}".format(**row)
        speedup, wanted = row["speedup"]["median"], row["expected_speedup"]
        expect(f"speed-up over running states, {what}", speedup, speedup >= wanted, f">= {wanted}")
        memory = row["memory_ratio"]
        expect(f"their peak memory over ours, {what}", memory, memory >= 20, ">= 20")
    found, at_most = result["growth"]["ratio"]["median"], result["growth"]["expected_at_most"]
    expect("time of T=16384 over T=4096, chunked", found, found <= at_most, f"<= {at_most}")
    flow = result["stream"]
    grown = flow["resident_growth_bytes"] / 1e6
    expect("resident growth over 1,000,000 tokens, MB", grown, grown < 50, "< 50")
    ratio = flow["last_over_first"]
    expect("time of the last 1,000 tokens over the first", ratio, ratio <= 1.1, "<= 1.1")
    error = flow["largest_difference_to_chunked"]
    expect("stream against chunked, last window", error, error <= 1e-4, "<= 1e-4")
    return answers


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as tables."""
    columns = ("running states", "chunked", "speed-up [quartiles]", "memory ratio")
    table = measure.table("H", "T", "d", "order", *columns)
    table.title = "forward, milliseconds"
    for row in result["against_running_states"]:
        times = row["seconds"]
        table.add_row(
            *(str(row[key]) for key in ("heads", "length", "width", "order")),
            *(f"{1e3 * times[name]['median']:.1f}" for name in ("running states", "chunked")),
            measure.spread(row["speedup"], digits=1),
            f"{row['memory_ratio']:.0f}",
        )
    console.print(table)
    for row in result["one_token"]:
        console.print(
            "one token, H={heads} d={width} order {order}: ".format(**row)
            + f"{1e3 * row['seconds']['median']:.2f} ms, state {row['state_bytes'] / 1024:,.0f} KiB"
        )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements, one after the other, on one core."""
    device, rounds = arguments.device, arguments.rounds
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **measure.opening("recurrence", arguments),
        "dtype": "torch.float32",
        "against_running_states": against_running_states(rounds, device),
        "growth": growth(rounds, device),
        "one_token": one_token(device),
        "stream": stream(device),
    }
    return {**result, "verdicts": verdicts(result)}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = measure.parsed(measure.parser(__doc__, rounds=7), argv)
    return measure.carry_out(arguments, run, show, itemgetter("verdicts"))


if __name__ == "__main__":
    raise SystemExit(main())
