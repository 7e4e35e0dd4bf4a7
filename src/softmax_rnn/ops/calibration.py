"""Measure this machine's speeds for the cost model: a few small calls, in under two seconds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softmax_rnn.ops import speeds
from softmax_rnn.ops.cost import Sizes, work_of_chunks, work_of_pairs
from softmax_rnn.ops.denominators import row_sum
from softmax_rnn.ops.finite import check_sums
from softmax_rnn.ops.forms import native_library
from softmax_rnn.ops.forms.blocked import blocked
from softmax_rnn.ops.forms.chunked import chunked
from softmax_rnn.ops.forms.native import native
from softmax_rnn.ops.forms.row_sums import RowSums
from softmax_rnn.ops.operation import attention
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.speeds import SHIPPED, Engine, Speeds, Work
from softmax_rnn.ops.state import largest_values
from softmax_rnn.ops.variants import resolve

Inputs = tuple[Tensor, Tensor, Tensor]

_HEADS = 8
# A short call, whose start matters: length, width, order.
_SHORT = (256, 8, 2)
# And longer ones, and the chunk length: each other number of `Work` matters in some of them.
_PAIRS = ((256, 64, 4), (512, 32, 2), (1024, 8, 4), (1024, 64, 1), (1024, 16, 2))
_CHUNKS = (
    *((256, 8, 2, 64), (512, 8, 4, 128), (512, 16, 2, 64), (512, 64, 1, 256), (1024, 64, 1, 64)),
    *((256, 64, 2, 64), (256, 32, 2, 256), (256, 16, 3, 64), (1024, 8, 1, 64)),
)
_FEWEST, _MOST, _ENOUGH = 3, 4, 0.03  # calls, the first of which is not counted; seconds
_BACKWARD = 3.0  # the time of a backward pass, in forward passes
# How far a number stays from the shipped one if the measurements say little about it.
_TRUST, _FURTHEST = 0.03, 30.0


def calibrate() -> Path:
    """Measure the speeds of this CPU with PyTorch's current number of threads, and keep them.

    Later calls of this process and of others use them. Other work on the machine makes them less
    precise. They choose the form and the length of chunks, so that results may change in rounding.

    Returns:
        The file, in the cache folder.
    """
    found: dict[Engine, Speeds] = {"torch": _measured("torch")}
    if native_library.ready():
        found["native"] = _measured("native")
    return speeds.save(found)


def _measured(engine: Engine) -> Speeds:
    form = native if engine == "native" else blocked
    pairs, chunks = _Samples(), _Samples()
    sizes, data = _sizes(*_SHORT, engine), _inputs(*_SHORT[:2])
    options: dict[str, Any] = {"causal": True, "mask": None}
    ways: dict[str, Callable[[], Tensor]] = {
        "pairs": lambda: form(*data, sizes.spec, **options).numerator,
        "chunks": lambda: chunked(*data, sizes.spec, **options, engine="torch").numerator,
    }
    if engine == "native":  # what follows differs: its sums of pairs are divided already
        ways = {
            "pairs": lambda: attention(*data, sizes.spec, form="native"),
            "chunks": lambda: attention(*data, sizes.spec, form="chunked"),
        }
    pairs.add(lambda: ways["pairs"]().sum().backward(), _trained(work_of_pairs(sizes, engine)))
    chunks.add(lambda: ways["chunks"]().sum().backward(), _trained(work_of_chunks(sizes)))
    # Both passes, whose times differ by form; of PyTorch's loops they would take too long.
    both = engine == "native"
    for length, width, order in _PAIRS:
        sizes, data = _sizes(length, width, order, engine), _inputs(length, width)
        work = work_of_pairs(sizes, engine)
        run = functools.partial(form, *data, sizes.spec, **options)
        pairs.add(
            functools.partial(_pass, run, sizes.spec, data, both), _trained(work) if both else work
        )
    for length, width, order, chunk in _CHUNKS:
        sizes, data = _sizes(length, width, order, engine), _inputs(length, width)
        work = work_of_chunks(sizes, chunk)
        run = functools.partial(chunked, *data, sizes.spec, **options, engine=engine, chunk=chunk)
        chunks.add(
            functools.partial(_pass, run, sizes.spec, data, both), _trained(work) if both else work
        )
    return Speeds(pairs.fitted(SHIPPED[engine].pairs), chunks.fitted(SHIPPED[engine].chunks))


def _pass(run: Callable[[], RowSums], spec: AttentionSpec, data: Inputs, both: bool) -> None:
    """A forward pass; if ``both``, with what follows in ``attention``, and a backward pass."""
    with torch.set_grad_enabled(both):
        sums = run()
        if not both:
            return
        check_sums(sums, spec, None, data, data[1], None)
        out = sums.numerator
        if sums.weight_sum is not None:
            largest = largest_values(data[2], None, None)
            out = out / row_sum(sums, spec, largest, None)[0].unsqueeze(-1)
        torch.autograd.grad(out, data, torch.ones_like(out))


def _trained(work: Work) -> Work:
    """That of a forward and a backward pass."""
    return Work(*((1 + _BACKWARD) * count for count in work))


def _sizes(length: int, width: int, order: int, engine: Engine) -> Sizes:
    spec = resolve(f"taylor:{order}")
    return Sizes(spec, length, length, width, width, heads=_HEADS, engine=engine)


def _inputs(length: int, width: int) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, _HEADS, length, width, generator=draw) for _ in range(3))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


class _Samples:
    """Calls that were timed, and the work that each does."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.works: list[Work] = []

    def add(self, run: Callable[[], object], work: Work) -> None:
        """Time a call: the shortest of some, after one that is not counted."""
        found: list[float] = []
        while len(found) < _FEWEST or (len(found) < _MOST and sum(found) < _ENOUGH):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
        self.times.append(min(found[1:]) * 1e9 / _HEADS)
        self.works.append(work)

    def fitted(self, shipped: Work) -> Work:
        """The times of each kind of work with the smallest relative errors, near the shipped."""
        times, given = np.array(self.times), np.array(self.works) * np.array(shipped)
        known = given.any(0)
        # In units of the shipped times, whose overall scale is the machine's.
        scale = float(np.median(times / given.sum(1)))
        rows = given[:, known] * scale / times[:, None]
        near = _TRUST * np.eye(int(known.sum()))
        ones = np.append(np.ones(len(rows)), np.diag(near))
        found = np.linalg.lstsq(np.vstack([rows, near]), ones)[0]
        factors = np.ones(len(known))
        factors[known] = scale * np.clip(found, 1 / _FURTHEST, _FURTHEST)
        return Work(*(float(x) for x in factors * np.array(shipped)))
