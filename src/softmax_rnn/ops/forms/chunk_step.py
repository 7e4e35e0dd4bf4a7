"""The chunked form's work on one chunk: functions of tensors, compiled where that pays.

A step of section 3.1's recurrence, all powers stacked: ``reference.power_rnn``. A token is a
column, with the query heads of a key head side by side: queries [N, D, G * L], keys [N, D, L],
value channels [N, C, L] and sums [N, C, G * L]; a state is [N, C, rows].
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.monomials import (
    Gathers,
    cumulative_dimension,
    degrees,
    dimension,
    monomials,
    monomials_backward,
    row_weights,
)
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec

# Device types on which steps are compiled: a GPU spends most of the time on so many launches. On a
# CPU a compiled step takes 0.5 to 1.9 times as long as an eager one.
COMPILED = {"cuda"} if importlib.util.find_spec("triton") else set()
BACKEND = "inductor"

# The errors of many products add up to a few units in the last place.
_ROUNDING = 4.0

Keys = tuple[Tensor, Tensor]  # and their value channels


class Tables(NamedTuple):
    """What the chunks of a call share."""

    series: PowerSeries
    slope: PowerSeries
    first: int  # the lowest power
    degree: int  # the highest
    sizes: tuple[int, ...]  # number of monomials of each power
    roots: tuple[float, ...]  # the square root of each power's coefficient
    unused: int  # rows of lower degrees, which `power` builds but does not keep in the state
    weights: Tensor
    future: Tensor
    gathers: Gathers | None


# Cached: a host-to-device copy synchronises.
@functools.lru_cache(maxsize=64)
def make_tables(
    spec: AttentionSpec,
    width: int,
    chunk: int,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool,
) -> Tables:
    """The tables of a spec, for keys of a width in chunks of a length."""
    series, (first, degree) = PowerSeries.from_spec(spec), degrees(spec)
    assert series.coefficients is not None
    with torch.inference_mode(False):
        weights = row_weights(spec, width, dtype, device)
        return Tables(
            series,
            series.derivative(),
            first,
            degree,
            tuple(dimension(width, n) for n in range(first, degree + 1)),
            tuple(math.sqrt(a) for a in series.coefficients[first:]),
            cumulative_dimension(width, degree) - len(weights),
            weights,
            torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril(-1),
            Gathers.build(width, degree, weights) if compiled else None,
        )


@functools.cache
def compiled(step: Callable[..., Any], backend: str, _: Hashable) -> Callable[..., Any]:
    """A step compiled for inputs of one kind; the last argument is the kind."""
    # PyTorch keeps at most 8 compilations of a code object: each kind has its own copy.
    code = step.__code__.replace(co_name=f"chunked_{step.__name__}")
    own = FunctionType(code, step.__globals__)
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend)


def forward(
    tables: Tables,
    q: Tensor | None,
    keys: Keys | None,
    state: Tensor | None,
    new_state: Tensor | None,
    noisy: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The sums of queries over a state and the keys of their own chunk, and the sums' noise.

    The state after the keys is written to ``new_state``, if that is given. ``noisy``: whether the
    last channel is a sum of weights whose terms can cancel.
    """
    reads = [] if q is None or state is None else [q]
    adds = [] if keys is None or new_state is None else [keys[0]]
    features = _features(tables, reads + adds)[1] if reads or adds else ()
    sums = noise = None
    if q is not None and keys is not None:
        k, v = keys
        sums = v @ _hide_future(tables, tables.series(k.mT @ q))
    if q is not None and state is not None:
        if len(tables.future) == 1:  # one token has fewer features than the state has numbers
            sums = _plus(sums, state, tables.weights.unsqueeze(-1) * features[0])
        else:
            sums = _plus(sums, tables.weights * state, features[0])
        if noisy:
            noise = _noise_bound(tables, q, state)
            if tables.gathers is None:  # a compiled step cannot branch on values
                noise = _tightened(noise, sums[:, -1], tables.weights * state[:, -1], features[0])
    if keys is not None and new_state is not None:
        added = keys[1], features[-1].mT
        if state is None:
            torch.bmm(*added, out=new_state)
        else:
            torch.baddbmm(state, *added, out=new_state)
    return sums, noise


def backward(
    tables: Tables,
    queries: tuple[Tensor, Tensor] | None,
    keys: Keys | None,
    state: Tensor | None,
    dnew_state: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of queries, keys, value channels and the state before.

    ``queries`` come with the gradient of their sums; ``dnew_state`` is that of the state after.
    """
    reads = [] if queries is None or state is None else [queries[0]]
    adds = [] if keys is None or dnew_state is None else [keys[0]]
    dq = dk = dv = dstate = None
    if reads or adds:
        every, features = _features(tables, reads + adds)
    dfeatures = []
    if queries is not None and state is not None:
        dfeatures.append((tables.weights * state).mT @ queries[1])
        dstate = tables.weights * (queries[1] @ features[0].mT)
        dstate = dstate if dnew_state is None else dstate + dnew_state
    if keys is not None and dnew_state is not None:
        dfeatures.append(dnew_state.mT @ keys[1])
        dv = dnew_state @ features[-1]
    if dfeatures:
        dcolumns = _columns_grad(tables, reads + adds, every, dfeatures)
        dq = dcolumns[0] if reads else None
        dk = dcolumns[-1] if adds else None
    if queries is not None and keys is not None:
        (q, grad), (k, v) = queries, keys
        scores = k.mT @ q
        dv = _plus(dv, grad, _hide_future(tables, tables.series(scores)).mT)
        dscores = _hide_future(tables, tables.slope(scores)).mul_(v.mT @ grad)
        dk, dq = _plus(dk, q, dscores.mT), _plus(dq, k, dscores)
    return dq, dk, dv, dstate


def _noise_bound(tables: Tables, q: Tensor, state: Tensor) -> Tensor:
    """The rounding error of a weight sum read from a state: [N, G * L] of queries [N, D, G * L].

    The products with the monomials can cancel to a small sum of ``w(q . k)``; their rounding error
    is relative to their size. For each power that is at most ``|q|^n`` times the norm of the
    state's monomials of that degree (Cauchy-Schwarz), for any lengths of keys and queries.
    """
    # Squares of high powers overflow float32; a device without float64 has to use it.
    wide = q.dtype if q.device.type == "mps" else torch.float64
    squares = state[:, -1].to(wide).square() * tables.weights
    norms = [part.sum(1, keepdim=True).sqrt() for part in squares.split(tables.sizes, dim=1)]
    length = q.to(wide).square().sum(1).sqrt()
    noise = torch.zeros_like(length)
    for norm, root in zip(reversed(norms), reversed(tables.roots), strict=True):
        noise = torch.addcmul(norm * root, noise, length)
    if tables.first:
        noise = noise * length**tables.first
    return (_ROUNDING * torch.finfo(q.dtype).eps * noise).to(q.dtype)


def _tightened(noise: Tensor, weight_sum: Tensor, row: Tensor, features: Tensor) -> Tensor:
    """The noise [N, L], from the products themselves where a sum is below their bound.

    ``row`` [N, rows] is the weighted state of the weight sum, ``features`` the queries' monomials.
    """
    if not (weight_sum.abs() < noise).any():
        return noise
    wide = noise.dtype if noise.device.type == "mps" else torch.float64
    products = row.to(wide).square().unsqueeze(1) @ features.to(wide).square()
    exact = _ROUNDING * torch.finfo(noise.dtype).eps * products.squeeze(1).sqrt()
    return noise.minimum(exact.to(noise.dtype))


def _features(tables: Tables, columns: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All monomials of the columns, built together, and for each those with state rows."""
    every = monomials(_joined(columns), tables.degree, tables.gathers)
    return every, every[:, tables.unused :].split([x.shape[2] for x in columns], dim=2)


def _columns_grad(
    tables: Tables, columns: list[Tensor], every: Tensor, grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of columns, given those of their monomials with state rows."""
    grad = _joined(grads)
    if tables.unused:
        grad = torch.cat([grad.new_zeros(len(grad), tables.unused, grad.shape[2]), grad], dim=1)
    joined = monomials_backward(_joined(columns), tables.degree, every, grad, tables.gathers)
    return joined.split([x.shape[2] for x in columns], dim=2)


def _joined(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)


def _hide_future(tables: Tables, weights: Tensor) -> Tensor:
    """Zero the weights of later keys of the same chunk [N, L, G * L], in place."""
    size = weights.shape[1]
    if size > 1:
        weights.unflatten(2, (-1, size)).masked_fill_(tables.future[:size, None, :size], 0.0)
    return weights


def _plus(x: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``x + a @ b``."""
    return a @ b if x is None else torch.baddbmm(x, a, b)
