"""Measure this machine's speeds for the cost model: a few small calls, in under two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from softmax_rnn.ops import speeds
from softmax_rnn.ops.cost import Sizes, work_of_chunks, work_of_pairs
from softmax_rnn.ops.forms import native_library
from softmax_rnn.ops.forms.blocked import blocked
from softmax_rnn.ops.forms.chunked import chunked
from softmax_rnn.ops.forms.native import native
from softmax_rnn.ops.speeds import SHIPPED, Engine, Speeds, Work
from softmax_rnn.ops.variants import resolve

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_HEADS = 8
# length, width, order; and the chunk length. Each number of `Work` matters in some of them.
_PAIRS = ((256, 8, 1), (256, 64, 4), (512, 32, 2), (1024, 8, 4), (1024, 64, 1), (1024, 16, 2))
_CHUNKS = (
    *((256, 8, 1, 64), (1024, 8, 4, 128), (1024, 16, 2, 64), (512, 64, 1, 256)),
    *((1024, 64, 1, 64), (256, 64, 2, 64), (512, 32, 2, 256), (256, 16, 3, 64)),
)
_ROUNDS = 4
# How far a number stays from the shipped one if the measurements say little about it.
_TRUST, _FURTHEST = 0.03, 30.0


class _Sample(NamedTuple):
    """A call to time, and the work that it does."""

    run: Callable[[], object]
    work: Work


def calibrate() -> Path:
    """Measure the speeds of this CPU with PyTorch's current number of threads, and keep them.

    Later calls of this process and of others use them. Other work on the machine makes them less
    precise. They choose the form and the length of chunks, so that results may change in rounding.

    Returns:
        The file, in the cache folder.
    """
    native_library.ready()
    engines: list[Engine] = [name for name in SHIPPED if name == "torch" or native_library.ready()]
    return speeds.save({engine: _measured(engine) for engine in engines})


@torch.no_grad()
def _measured(engine: Engine) -> Speeds:
    form, shipped = (native if engine == "native" else blocked), SHIPPED[engine]
    pairs, chunks = [], []
    for length, width, order in _PAIRS:
        sizes, data = _sizes(length, width, order, engine), _inputs(length, width)

        def every_pair(sizes: Sizes = sizes, data: Inputs = data) -> object:
            return form(*data, sizes.spec, causal=True, mask=None)

        pairs.append(_Sample(every_pair, work_of_pairs(sizes, engine)))
    for length, width, order, chunk in _CHUNKS:
        sizes, data = _sizes(length, width, order, engine), _inputs(length, width)

        def by_chunks(sizes: Sizes = sizes, data: Inputs = data, chunk: int = chunk) -> object:
            spec = sizes.spec
            return chunked(*data, spec, causal=True, mask=None, chunk=chunk, engine=engine)

        chunks.append(_Sample(by_chunks, work_of_chunks(sizes, chunk)))
    return Speeds(_fitted(pairs, shipped.pairs), _fitted(chunks, shipped.chunks))


def _sizes(length: int, width: int, order: int, engine: Engine) -> Sizes:
    spec = resolve(f"taylor:{order}")
    return Sizes(spec, length, length, width, width, heads=_HEADS, engine=engine)


def _inputs(length: int, width: int) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, _HEADS, length, width, generator=draw) for _ in range(3))
    return q, k, v


def _fitted(samples: list[_Sample], shipped: Work) -> Work:
    """The times of each kind of work with the smallest relative errors, near the shipped ones."""
    times = [_seconds(sample.run) * 1e9 / _HEADS for sample in samples]
    given = np.array([sample.work for sample in samples]) * np.array(shipped)
    known = given.any(0)
    # In units of the shipped times, whose overall scale is the machine's.
    scale = float(np.median(np.array(times) / given.sum(1)))
    rows = given[:, known] * scale / np.array(times)[:, None]
    near = _TRUST * np.eye(int(known.sum()))
    ones = np.append(np.ones(len(rows)), np.diag(near))
    found = np.linalg.lstsq(np.vstack([rows, near]), ones)[0]
    factors = np.ones(len(known))
    factors[known] = scale * np.clip(found, 1 / _FURTHEST, _FURTHEST)
    return Work(*(float(x) for x in factors * np.array(shipped)))


def _seconds(run: Callable[[], object]) -> float:
    """The shortest time, after one that is not counted."""
    run()
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
