"""Shared measurement code: interleaved rounds, ratios, peak memory, the machine's ceiling."""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.benchmark import Timer

from softmax_rnn._utils.files import write_json
from softmax_rnn.training.environment import environment
from softmax_rnn.training.matmul import widest_float32_products

Work = Callable[[], object]

RESULTS = Path(__file__).parent / "results"
FORMAT = 2  # version of the JSON files; readers ignore other versions
WARM_UP, LEAST_ROUNDS = 2, 5
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
# Rows of the square matrices, and bytes of the copy, that measure the ceiling.
CEILING = {"cpu": (2048, 2**28), "cuda": (8192, 2**30)}
_NO_NAMES = {"intel", "amd", "r", "tm", "cpu", "processor", "core", "gen", "th", "genuine"}
_FLUSHED = 2**28  # bytes, more than the cache of any GPU


def synchronize(device: str) -> None:
    """Wait for the GPU, if the device is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(
    work: Mapping[str, Work],
    rounds: int,
    *,
    device: str = "cpu",
    patience: float = math.inf,
    events: bool = False,
    shuffled: bool = True,
) -> dict[str, list[float]]:
    """The time of each piece of work in every round; in a round each runs once.

    Noise that lasts longer than a round affects all pieces equally, so ratios within a round vary
    less than the times.

    Args:
        work: what to time, by name.
        rounds: number of rounds, after two that are not counted.
        device: ``cpu`` or ``cuda``.
        patience: seconds after which no further round begins, once five have been counted.
        events: on a GPU, measure the time between two CUDA events, with flushed caches before each
            piece and no synchronisation between pieces; else wall time until the GPU is idle.
        shuffled: whether each round has a random order, so that no piece has a fixed predecessor.
    """
    draw, order = random.Random(0), list(work)
    times: dict[str, list[float]] = {name: [] for name in work}
    started = 0.0
    for index in range(rounds + WARM_UP):
        if index == WARM_UP:
            started = time.perf_counter()
        elif index >= WARM_UP + LEAST_ROUNDS and time.perf_counter() - started > patience:
            break
        if shuffled:
            draw.shuffle(order)
        pieces = [work[name] for name in order]
        found = _by_events(pieces) if events and device == "cuda" else _by_clock(pieces, device)
        if index >= WARM_UP:
            for name, value in zip(order, found, strict=True):
                times[name].append(value)
    return times


def _by_clock(pieces: Sequence[Work], device: str) -> list[float]:
    found = []
    for run in pieces:
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return found


def _by_events(pieces: Sequence[Work]) -> list[float]:
    flushed = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    events = []
    for run in pieces:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in events]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def ratios(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios, round by round."""
    return summary([a / b for a, b in zip(times, reference, strict=True)])


def peak_extra_bytes(run: Work, device: str = "cpu") -> int:
    """Peak memory of a run minus the memory in use before it.

    On a GPU this is the allocator's memory, on a CPU the resident memory of the process. Linux can
    reset its peak, after the C library has returned the memory of earlier runs.
    """
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    return sorted(_peak_resident(run) for _ in range(3))[1]


def _peak_resident(run: Work) -> int:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measured(
    work: Mapping[str, Work], times: Mapping[str, list[float]], reference: str, device: str
) -> dict[str, dict[str, Any]]:
    """The fields of every row: times, their ratio to the reference's, peak memory."""
    return {
        name: {
            "seconds": summary(times[name]),
            "ratio": ratios(times[name], times[reference]),
            "rounds": times[name],
            "peak_extra_bytes": peak_extra_bytes(run, device),
        }
        for name, run in work.items()
    }


def relative_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest of ``|found - expected| / |expected|``, in Frobenius norms."""
    with torch.no_grad():
        errors = [
            float((found.double() - expected.double()).norm() / expected.double().norm())
            for found, expected in pairs
        ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def ceiling(device: str) -> dict[str, Any]:
    """The fastest of many large matrix products and copies: what no contestant can beat.

    A copy moves its bytes twice, in and out. The products are in the dtype of the benchmarks, on a
    CPU by the fastest kernels that keep float32.
    """
    rows, copied = CEILING[device]
    dtype = DTYPES[device]
    left, right = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(copied // 4, device=device)
    names = {"a": left, "b": right, "into": torch.empty_like(source), "source": source}

    def fastest(statement: str) -> float:
        timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
        return min(timer.timeit(1).mean for _ in range(10))

    with widest_float32_products():
        product = fastest("a @ b")
    return {
        "flop_per_second": 2.0 * rows**3 / product,
        "bytes_per_second": 2.0 * copied / fastest("into.copy_(source)"),
        "how": f"{rows} x {rows} product in {str(dtype)[6:]}, copy of {copied / 2**20:.0f} MiB",
    }


def machine() -> dict[str, Any]:
    """Versions, processor and GPUs, and the CPU load before the benchmark."""
    return {
        **environment(),
        "cuda": torch.version.cuda,
        "busy_before_percent": psutil.cpu_percent(interval=1.0),
    }


def place(device: str, where: Mapping[str, Any]) -> str:
    """The kind of machine that a result is from: ``cuda``, or ``cpu-`` and the processor's name.

    Results of other machines are kept beside each other.
    """
    if device == "cuda":
        return device
    words = re.findall(r"[a-z]+", where["processor"].lower())
    named = [word for word in words if word not in _NO_NAMES]
    return f"cpu-{named[0]}" if named else "cpu"


def parser(
    description: str | None, rounds: int, patience: float | None = None
) -> argparse.ArgumentParser:
    """The options of every benchmark; ``--patience`` only if it has a default."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--rounds", type=int, default=rounds, help="paired rounds to time")
    if patience is not None:
        options.add_argument(
            "--patience", type=float, default=patience, help="seconds after which 5 rounds suffice"
        )
    options.add_argument("--out", type=Path, help="JSON file to write")
    return options


def parsed(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed options; an error if the device is not available."""
    arguments = options.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("--device cuda: PyTorch sees no GPU here.")
    arguments.words = sys.argv[1:] if argv is None else list(argv)
    if "--out" in arguments.words:  # does not affect the measurement
        place = arguments.words.index("--out")
        del arguments.words[place : place + 2]
    return arguments


def opening(benchmark: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The head of a result: the command, the machine, its ceiling."""
    where = machine()
    busy = where["busy_before_percent"]
    if busy > 10:
        print(f"Other processes keep {busy:.0f}% of the cores busy: times will be noisy.")
    return {
        "format": FORMAT,
        "benchmark": benchmark,
        "command": " ".join([f"python -m benchmarks.{benchmark}", *arguments.words]),
        "device": arguments.device,
        "environment": where,
        "ceiling": ceiling(arguments.device),
    }


def carry_out(
    arguments: argparse.Namespace,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    judge: Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]],
) -> int:
    """Run a benchmark, show what it found and which expectations hold, and write the JSON."""
    console = Console(width=110)
    result = run(arguments)
    show(result, console)
    for answer in judge(result):
        mark = {True: "holds", False: "FAILS", None: "not measured"}[answer["holds"]]
        if answer["holds"] is None and answer["found"] is not None:
            mark = "holds, where measured"
        found = "" if answer["found"] is None else f": {answer['found']:.3g}"
        console.print(f"{mark}  {answer['what']}{found} ({answer['limit']})")
    where = place(arguments.device, result["environment"])
    out = arguments.out or RESULTS / f"{result['benchmark']}-{where}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    console.print(f"Written to {out}")
    return 0


def spread(value: Mapping[str, float], scale: float = 1.0, digits: int = 2) -> str:
    """``1.02 [1.00, 1.05]``: median and quartiles."""
    median, low, high = (f"{scale * value[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} [{low}, {high}]"


def table(*columns: str) -> Table:
    """A table whose columns are right-aligned, except for ``name``."""
    made = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    return made
