"""What the chunked form does with one chunk: functions of tensors, compiled where that pays.

Columns are tokens, the query heads of a key head side by side: queries [N, D, G * L], keys
[N, D, L], value channels [N, C, L] and sums [N, C, G * L]; a state is [N, C, rows].
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.forms.channels import Terms, closer, read_noise
from softmax_rnn.ops.monomials import (
    Gathers,
    cumulative_dimension,
    degrees,
    monomials,
    monomials_backward,
    row_weights,
)
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec

# Types of devices on which steps are compiled: a GPU waits for the launches of so many operations.
# A CPU does not: there the compiled step takes 0.5 to 1.9 times as long as the eager one.
COMPILED = {"cuda"} if importlib.util.find_spec("triton") else set()
BACKEND = "inductor"

Keys = tuple[Tensor, Tensor]  # and their value channels


class Tables(NamedTuple):
    """What the chunks of a call share."""

    series: PowerSeries
    slope: PowerSeries
    terms: Terms
    degree: int
    unused: int  # monomials of lower degrees, which the single power of `power` only passes through
    weights: Tensor
    future: Tensor
    gathers: Gathers | None


# Kept: a copy to a GPU waits for all that it has to do.
@functools.lru_cache(maxsize=64)
def tables(
    spec: AttentionSpec,
    width: int,
    chunk: int,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool,
) -> Tables:
    """Those of a spec, for keys of a width in chunks of a length."""
    series, degree = PowerSeries.of(spec), degrees(spec)[1]
    with torch.inference_mode(False):
        weights = row_weights(spec, width, dtype, device)
        return Tables(
            series,
            series.derivative(),
            Terms.of(spec, width),
            degree,
            cumulative_dimension(width, degree) - len(weights),
            weights,
            torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril(-1),
            Gathers.of(width, degree, weights) if compiled else None,
        )


@functools.cache
def compiled(step: Callable[..., Any], backend: str, _: Hashable) -> Callable[..., Any]:
    """A step compiled for inputs of one kind, which the last argument tells from others."""
    # PyTorch keeps but 8 compilations of a function's code: each kind has its own copy.
    code = step.__code__.replace(co_name=f"chunked_{step.__name__}")
    own = FunctionType(code, step.__globals__)
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend)


def forward(
    of: Tables,
    q: Tensor | None,
    keys: Keys | None,
    seen: Tensor | None,
    after: Tensor | None,
    weighs: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The sums of queries over a state and the keys of their own chunk, and the sums' noise.

    Args:
        of: the tables.
        q: queries, if there are any.
        keys: keys and their value channels, if there are any.
        seen: the state before, if there is one.
        after: where to write the state after the keys, if it is wanted.
        weighs: whether the last channel is a sum of weights that may cancel.
    """
    reads = [] if q is None or seen is None else [q]
    adds = [] if keys is None or after is None else [keys[0]]
    features = _features(of, reads + adds)[1] if reads or adds else ()
    sums = noise = None
    if q is not None and keys is not None:
        k, v = keys
        sums = v @ _hide_future(of, of.series(k.mT @ q))
    if q is not None and seen is not None:
        weighted = of.weights * seen
        sums = _plus(sums, weighted, features[0])
        if weighs:
            noise = read_noise(q, seen, of.terms, of.weights)
            if of.gathers is None:  # compiled steps cannot decide by what they find
                noise = closer(noise, sums[:, -1], weighted[:, -1], features[0])
    if keys is not None and after is not None:
        added = keys[1], features[-1].mT
        torch.bmm(*added, out=after) if seen is None else torch.baddbmm(seen, *added, out=after)
    return sums, noise


def backward(
    of: Tables,
    queries: tuple[Tensor, Tensor] | None,
    keys: Keys | None,
    seen: Tensor | None,
    dafter: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of queries, keys, value channels and the state before.

    Args:
        of: the tables.
        queries: queries and the gradient of their sums.
        keys: as in :func:`forward`.
        seen: the state before, if there is one.
        dafter: the gradient of the state after, if it has one.
    """
    reads = [] if queries is None or seen is None else [queries[0]]
    adds = [] if keys is None or dafter is None else [keys[0]]
    dq = dk = dv = dseen = None
    if reads or adds:
        every, features = _features(of, reads + adds)
    dfeatures = []
    if queries is not None and seen is not None:
        dfeatures.append((of.weights * seen).mT @ queries[1])
        dseen = of.weights * (queries[1] @ features[0].mT)
        dseen = dseen if dafter is None else dseen + dafter
    if keys is not None and dafter is not None:
        dfeatures.append(dafter.mT @ keys[1])
        dv = dafter @ features[-1]
    if dfeatures:
        dcolumns = _columns_grad(of, reads + adds, every, dfeatures)
        dq = dcolumns[0] if reads else None
        dk = dcolumns[-1] if adds else None
    if queries is not None and keys is not None:
        (q, grad), (k, v) = queries, keys
        scores = k.mT @ q
        dv = _plus(dv, grad, _hide_future(of, of.series(scores)).mT)
        dscores = _hide_future(of, of.slope(scores)).mul_(v.mT @ grad)
        dk, dq = _plus(dk, q, dscores.mT), _plus(dq, k, dscores)
    return dq, dk, dv, dseen


def _features(of: Tables, columns: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All monomials of the columns, built together, and for each those with state rows."""
    every = monomials(_joined(columns), of.degree, of.gathers)
    return every, every[:, of.unused :].split([x.shape[2] for x in columns], dim=2)


def _columns_grad(
    of: Tables, columns: list[Tensor], every: Tensor, grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of columns, given those of their monomials with state rows."""
    grad = _joined(grads)
    if of.unused:
        grad = torch.cat([grad.new_zeros(len(grad), of.unused, grad.shape[2]), grad], dim=1)
    joined = monomials_backward(_joined(columns), of.degree, every, grad, of.gathers)
    return joined.split([x.shape[2] for x in columns], dim=2)


def _joined(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)


def _hide_future(of: Tables, weights: Tensor) -> Tensor:
    """Zero the weights of later keys of the same chunk [N, L, G * L], in place."""
    size = weights.shape[1]
    weights.unflatten(2, (-1, size)).masked_fill_(of.future[:size, None, :size], 0.0)
    return weights


def _plus(x: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``x + a @ b``."""
    return a @ b if x is None else torch.baddbmm(x, a, b)
