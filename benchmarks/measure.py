"""How everything here is measured: interleaved rounds, medians, ratios, peak memory."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

Work = Callable[[], object]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """The time of each piece of work in every round; in a round each runs once, in turn.

    Two rounds before the first are not counted. Noise that lasts longer than a round meets all
    pieces alike, so that ratios within a round are steadier than the times.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    for index in range(rounds + 2):
        for name, run in work.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            if index >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def ratios(times: list[float], reference: list[float]) -> dict[str, float]:
    """Median and quartiles of the ratios, round by round."""
    return summary([a / b for a, b in zip(times, reference, strict=True)])


def peak_extra_bytes(run: Work) -> int:
    """Peak memory of a run above what was held before it.

    On a GPU as its allocator counts; elsewhere the resident memory of the process, whose peak
    Linux can reset, once the C library has given back what it keeps of earlier runs.
    """
    run()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    return sorted(_peak_resident(run) for _ in range(3))[1]


def _peak_resident(run: Work) -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
