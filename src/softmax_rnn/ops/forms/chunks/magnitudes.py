"""How exact a weight sum is that was read from a state: a bound from the keys that were added.

Keys may cancel in a state, and products of monomials may cancel when a query reads it. What is left
can be as small as the rounding errors, whose size follows what was added. So beside its sums a
state has magnitudes, one number for each power n > 0 of the series and each channel d of the keys:

    A[n, d] = sum_s |k_sd|^n

They fade as the monomial ``k_d^n`` does. By Hoelder's inequality, the absolute values of a monomial
of degree n add up to at most the product of ``A[n, d]^(1/n)`` over its factors. If the rounding
errors of the monomials are independent, what a query q (times the scale) reads has an error of
at most about

    eps * sum_n |a_n| sqrt(n!) (sum_d q_d^2 A[n, d]^(2/n))^(n/2)

Every form with a state takes its noise from here. The weights of single pairs have no such error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from softmax_rnn.ops.decay import fade_
from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.chunks.settings import plain_spec
from softmax_rnn.ops.forms.row_sums import no_data
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec, Decay, Series

# The rounding errors of many products, added up at once, are a few units in the last place.
# ``growth`` is what further additions to a state add.
ROUNDING = 4.0


def powers(spec: AttentionSpec) -> range:
    """The powers of a series that have magnitudes; a sum of ones (power 0) needs none."""
    assert spec.powers is not None
    first, last = spec.powers
    return range(max(first, 1), last + 1)


@functools.lru_cache(maxsize=64)
def roundings(spec: AttentionSpec, dtype: torch.dtype) -> tuple[float, ...]:
    """The factor of each of the :func:`powers` in the noise; learned coefficients count as 1."""
    known = PowerSeries.known_part(spec).coefficients
    assert known is not None
    unit = ROUNDING * torch.finfo(dtype).eps
    return tuple(unit * abs(float(known[n])) * math.sqrt(math.factorial(n)) for n in powers(spec))


def fading(spec: AttentionSpec, total: Tensor) -> Tensor:
    """How far magnitudes fade, [..., P or 1, 1 or D], by sums of log decays [..., 1 or D]."""
    total = total.unsqueeze(-2).clone()
    if spec.decay == "channel":
        counts = powers(spec)
        n = torch.arange(counts.start, counts.stop, device=total.device)
        total = total * n.unsqueeze(-1)
    return fade_(total)


def growth(
    tokens: int | Tensor, queries: int, keys: int, causal: bool, chunk: int, like: Tensor
) -> Tensor:
    """How the noise grows with the number of additions to a state, [T or 1]: by its square root.

    Each addition rounds the state, and rounding errors differ in sign. (Those of many equal tokens
    may not. Float64 is for these.) Keys are added in chunks, the ``tokens`` before them one by one.
    """
    first = keys - queries if causal else keys
    index = torch.arange(first, first + (queries if causal else 1), device=like.device)
    return (1 + tokens + index // chunk).to(like.dtype).sqrt()


def read_noise(
    inputs: Columns,
    before: Tensor | None,
    weights: tuple[Series, int, Sequence[float] | None, Decay],
    causal: bool,
    chunk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The noise [X, R, T] of what queries read, and the magnitudes [X, P, D] after the last key.

    With ``causal`` each chunk of queries reads the state before the chunk, else that after all
    keys. ``before`` are the magnitudes before the first key. Queries are still to be multiplied by
    ``scale``. ``weights`` are series, order, coefficients and decay of a spec. Both results have no
    gradient.
    """
    optional = (inputs.log_decay, inputs.coefficients, before)
    given: list[Any] = [inputs.queries.detach(), inputs.keys.detach()]
    given += [x if x is None else x.detach() for x in optional]
    given += [*weights, causal, chunk, scale]
    compute = _read if no_data(inputs.queries) else _compute
    found: tuple[Tensor, Tensor] = compute(*given)
    return found


@torch.no_grad()
def _compute(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    learned: Tensor | None,
    before: Tensor | None,
    series: Series,
    order: int,
    coefficients: Sequence[float] | None,
    decay: Decay,
    causal: bool,
    chunk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    fixed = None if coefficients is None else tuple(coefficients)
    spec, length = plain_spec(series, order, fixed, decay), q.shape[3]
    past = k.shape[2] - length if causal else k.shape[2]
    k, queries = k.mT, q.permute(0, 2, 3, 1)  # a row per token
    old = new = None
    if log_decay is not None:
        old, new = log_decay.mT[:, :past], log_decay.mT[:, past:]
    at = _running(spec, k[:, :past], old, before, max(past, 1))[:, -1:]
    queries, faded = queries.unsqueeze(2), None
    if causal:
        at = _running(spec, k[:, past:], new, at[:, 0], chunk)
        queries = _blocks(queries.squeeze(2), chunk)
        if new is not None:
            faded = fade_(_blocks(new.unsqueeze(1), chunk).cumsum(3).to(q.dtype))
            if decay == "channel":
                queries, faded = queries * faded, None
    noise = _noise(spec, queries, at[:, : queries.shape[2]], learned, scale)
    noise = noise if faded is None else noise * faded.squeeze(-1)
    return noise.flatten(2)[..., :length].contiguous(), at[:, -1].to(q.dtype, copy=True)


# In a compiled graph: it depends on the number of blocks.
_read = library.custom_op(
    "softmax_rnn::read_noise",
    _compute,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor? log_decay, Tensor? learned, Tensor? before, str series, "
    "int order, float[]? coefficients, str decay, bool causal, SymInt chunk, float scale) "
    "-> (Tensor, Tensor)",
)


@_read.register_fake
def _empty(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    series, order, coefficients, decay = others[3:7]
    fixed = None if coefficients is None else tuple(coefficients)
    count = len(powers(plain_spec(series, order, fixed, decay)))
    return q.new_empty(q.shape[0], *q.shape[2:]), q.new_empty(k.shape[0], count, k.shape[1])


def _blocks(x: Tensor, length: int) -> Tensor:
    """[..., S, D] as [..., blocks, length, D], with zeros at the end."""
    count = -(-x.shape[-2] // length)
    missing = count * length - x.shape[-2]
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (count, length))


def _running(
    spec: AttentionSpec, k: Tensor, log_decay: Tensor | None, before: Tensor | None, length: int
) -> Tensor:
    """The magnitudes before each block of keys and after the last one, [X, blocks + 1, P, D].

    Keys and log decays are [X, S, D].
    """
    wide = torch.float32 if k.device.type == "mps" else torch.float64
    counts, each = powers(spec), _blocks(k.abs(), length)
    first = k.new_zeros(k.shape[0], len(counts), k.shape[2]) if before is None else before
    found = first.to(wide).unsqueeze(1)
    if not each.numel() or not counts:
        return found.expand(-1, 1 + each.shape[1], -1, -1)
    left = None
    if log_decay is not None:
        total = _blocks(log_decay, length).cumsum(2)
        left = fade_((total[:, :, -1:] - total).to(k.dtype))
        if spec.decay == "channel":
            each, left = each * left, None
    terms = (each**n if left is None else each**n * left for n in counts)
    found = torch.cat([found, torch.stack([x.sum(2) for x in terms], 2).to(wide)], dim=1)
    if log_decay is None:
        return found.cumsum(1)
    ends, distance = F.pad(total[:, :, -1].to(wide), (0, 0, 1, 0)).cumsum(1), 1
    while distance < found.shape[1]:  # twice as many blocks are added up in every round
        factor = fading(spec, ends[:, distance:] - ends[:, :-distance])
        later = found[:, distance:] + factor * found[:, :-distance]
        found, distance = torch.cat([found[:, :distance], later], dim=1), 2 * distance
    return found


def _noise(
    spec: AttentionSpec, q: Tensor, at: Tensor, learned: Tensor | None, scale: float
) -> Tensor:
    """The noise [X, R, blocks, L] of queries [X, R, blocks, L, D].

    Each block reads the magnitudes ``at`` [X, blocks, P, D].
    """
    counts, noise = powers(spec), q.new_zeros(q.shape[:-1])
    if not counts:
        return noise
    n = torch.arange(counts.start, counts.stop, device=at.device, dtype=at.dtype)
    roots = abs(scale) * at ** (1 / n).unsqueeze(1)
    unit = roots.amax((2, 3), keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    squares = (roots / unit).square().to(q.dtype).unsqueeze(1)  # at most 1, to stay in range
    sizes = (squares @ q.square().mT).sqrt() * unit.to(q.dtype).unsqueeze(1)
    for i, (power, factor) in enumerate(zip(counts, roundings(spec, q.dtype), strict=True)):
        each = factor * sizes[:, :, :, i] ** power
        noise += each if learned is None else each * learned[:, :, power, None, None].abs()
    return noise.nan_to_num(nan=0.0, posinf=0.0)  # of squares that are out of range
