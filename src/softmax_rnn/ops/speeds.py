"""How fast a CPU is at the work that the cost model counts: shipped numbers, or its own.

``calibration`` measures them once a machine, and this module reads them. They choose among forms
that agree up to rounding, so that wrong ones can only cost time.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from softmax_rnn._utils.files import read_small_json, write_json
from softmax_rnn._utils.machine import cache_folder, processor
from softmax_rnn.ops.compiler import constant_when_compiled

Engine = Literal["torch", "native"]
FORMAT = 2  # version of the file; others are ignored
VARIABLE = "SOFTMAX_RNN_SPEEDS"  # "shipped": nothing is measured or read


class Work(NamedTuple):
    """What a form does, or the nanoseconds that each takes.

    Attributes:
        multiply: a multiply-add of a matrix product.
        build: an element of monomials, or of a state that is written.
        pair: the mask and the sums of a pair of a query and a key.
        power: a step of Horner's rule for a pair.
        call: an operation of PyTorch, or the start of a block or chunk.
        start: what surrounds them, once for all heads.
    """

    multiply: float
    build: float
    pair: float
    power: float
    call: float
    start: float

    def time(self, each: Work) -> float:
        """Nanoseconds, with ``each`` of these."""
        return sum(count * time for count, time in zip(self, each, strict=True))


class Speeds(NamedTuple):
    """The times of the forms that compute every pair, and of the chunked form."""

    pairs: Work
    chunks: Work


# Of a forward pass: of `torch` on one core of an EPYC, of `native` on two of a Xeon with AVX-512.
_TORCH = Work(0.015, 0.5, 1.0, 0.13, 3000.0, 2e5)
SHIPPED: dict[Engine, Speeds] = {
    "torch": Speeds(_TORCH, _TORCH),
    "native": Speeds(
        Work(0.0065, 0.0, 0.09, 0.035, 500.0, 1.9e5), Work(0.0075, 0.145, 0.5, 0.015, 2200.0, 2.3e5)
    ),
}


def speeds(engine: Engine) -> Speeds:
    """Those of this machine, if they were measured, or else the shipped ones."""
    return _known()[engine]


def file() -> Path:
    """Where those of this processor, PyTorch and number of threads are."""
    parts = (FORMAT, processor(), torch.__version__, torch.get_num_threads())
    return cache_folder() / f"speeds-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"


def save(found: dict[Engine, Speeds]) -> Path:
    """Keep measured speeds for this and later processes; returns their file."""
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        engine: {part: work._asdict() for part, work in each._asdict().items()}
        for engine, each in found.items()
    }
    names = {"processor": processor(), "threads": torch.get_num_threads()}
    write_json(path, {"format": FORMAT, **names, "nanoseconds": data})
    _read.cache_clear()
    return path


def measurable() -> bool:
    """Whether this machine's speeds are wanted: unless the environment says ``shipped``."""
    return os.environ.get(VARIABLE) != "shipped"


@constant_when_compiled
def _known() -> dict[Engine, Speeds]:
    return _read(torch.get_num_threads()) if measurable() else SHIPPED


@functools.lru_cache(maxsize=16)
def _read(threads: int) -> dict[Engine, Speeds]:
    try:
        data = read_small_json(file())["nanoseconds"]
        return {engine: _checked(data.get(engine), SHIPPED[engine]) for engine in SHIPPED}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return SHIPPED


def _checked(data: Any, shipped: Speeds) -> Speeds:
    """The speeds in ``data``, by default the shipped ones; ``ValueError`` for invalid numbers."""
    if data is None:
        return shipped
    found = Speeds(*(Work(**data[part]) for part in Speeds._fields))
    if not all(math.isfinite(x) and x >= 0 for work in found for x in work):
        raise ValueError("not a time")
    return found
