"""One chunk of the chunked form: functions of tensors, compiled on a GPU.

They compute one step of section 3.1's recurrence (``reference.power_rnn``) for all powers together.
Each token is a column; the query heads of one key head are adjacent. Shapes: queries
[N, D, G * L], keys [N, D, L], value channels [N, C, L], sums [N, C, G * L], state [N, C, rows].
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

# Device types on which steps are compiled. On a GPU, the many kernel launches take most of the
# time. On a CPU, a compiled step takes 0.5 to 1.9 times as long as an eager one.
COMPILED = {"cuda"} if importlib.util.find_spec("triton") else set()
BACKEND = "inductor"

# The rounding errors of many products add up to a few units in the last place.
_ROUNDING = 4.0

Keys = tuple[Tensor, Tensor]  # keys and their value channels


class Tables(NamedTuple):
    """Constants that all chunks of a call share."""

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
    """The tables of a spec, for a key width and a chunk length."""
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
    """The step, compiled for one kind of inputs; the last argument identifies the kind."""
    # PyTorch keeps at most 8 compilations per code object, so each kind gets a copy of the code.
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
    """The sums of queries over a state and over the keys of their own chunk, and the noise.

    If ``new_state`` is given, the state after the keys is written to it. ``noisy`` is whether the
    last channel is a sum of weights whose terms can cancel; the noise is its rounding error.
    """
    reads = [] if q is None or state is None else [q]
    adds = [] if keys is None or new_state is None else [keys[0]]
    features = _features(tables, reads + adds)[1] if reads or adds else ()
    sums = noise = None
    if q is not None and keys is not None:
        k, v = keys
        sums = v @ _hide_future(tables, tables.series(k.mT @ q))
    if q is not None and state is not None:
        if len(tables.future) == 1:  # one token: features are smaller than the state
            sums = _plus(sums, state, tables.weights.unsqueeze(-1) * features[0])
        else:
            sums = _plus(sums, tables.weights * state, features[0])
        if noisy:
            noise = _noise_bound(tables, q, state)
            if tables.gathers is None:  # a compiled step cannot branch on values
                noise = _tighter_noise(
                    noise, sums[:, -1], tables.weights * state[:, -1], features[0]
                )
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
    """The gradients of queries, keys, value channels and the state before the chunk.

    ``queries`` is a pair: the queries and the gradient of their sums. ``dnew_state`` is the
    gradient of the state after the chunk.
    """
    reads = [] if queries is None or state is None else [queries[0]]
    adds = [] if keys is None or dnew_state is None else [keys[0]]
    dq = dk = dv = dstate = None
    if reads or adds:
        all_features, features = _features(tables, reads + adds)
    dfeatures = []
    if queries is not None and state is not None:
        dfeatures.append((tables.weights * state).mT @ queries[1])
        dstate = tables.weights * (queries[1] @ features[0].mT)
        dstate = dstate if dnew_state is None else dstate + dnew_state
    if keys is not None and dnew_state is not None:
        dfeatures.append(dnew_state.mT @ keys[1])
        dv = dnew_state @ features[-1]
    if dfeatures:
        dcolumns = _columns_grad(tables, reads + adds, all_features, dfeatures)
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

    Products of monomials can cancel, so that the sum of ``w(q . k)`` is small. The rounding error
    is proportional to the size of these products. For each power, this size is at most ``|q|^n``
    times the norm of the state's monomials of that degree (Cauchy-Schwarz), for keys and queries of
    any length.
    """
    # Squares of high powers overflow float32, but MPS devices have no float64.
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


def _tighter_noise(noise: Tensor, weight_sum: Tensor, row: Tensor, features: Tensor) -> Tensor:
    """The noise [N, L]; computed from the products themselves if a sum is below its bound.

    ``row`` [N, rows] is the weighted state of the weight sum, ``features`` the queries' monomials.
    """
    if not (weight_sum.abs() < noise).any():
        return noise
    wide = noise.dtype if noise.device.type == "mps" else torch.float64
    products = row.to(wide).square().unsqueeze(1) @ features.to(wide).square()
    exact = _ROUNDING * torch.finfo(noise.dtype).eps * products.squeeze(1).sqrt()
    return noise.minimum(exact.to(noise.dtype))


def _features(tables: Tables, columns: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All monomials of the joined columns; for each tensor of columns, those kept in the state."""
    features = monomials(_joined(columns), tables.degree, tables.gathers)
    return features, features[:, tables.unused :].split([x.shape[2] for x in columns], dim=2)


def _columns_grad(
    tables: Tables, columns: list[Tensor], all_features: Tensor, grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of columns, from the gradients of their monomials kept in the state."""
    grad = _joined(grads)
    if tables.unused:
        grad = torch.cat([grad.new_zeros(len(grad), tables.unused, grad.shape[2]), grad], dim=1)
    joined = monomials_backward(_joined(columns), tables.degree, all_features, grad, tables.gathers)
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
