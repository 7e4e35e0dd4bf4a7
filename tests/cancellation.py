"""Keys that cancel in a state, and how exact a result can be: from the inputs, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops.decay import differences
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.series import PowerSeries


def _halves(k: Tensor) -> Tensor:
    first = k[..., : (k.shape[-2] + 1) // 2, :]
    return torch.cat([first, -first], dim=-2)[..., : k.shape[-2], :]


def _alternating(k: Tensor) -> Tensor:
    first = k[..., : (k.shape[-2] + 1) // 2, :]
    return torch.stack([first, -first], dim=-2).flatten(-3, -2)[..., : k.shape[-2], :]


def _back_and_forth(k: Tensor) -> Tensor:
    half = k.shape[-2] // 2
    return torch.cat([k[..., : k.shape[-2] - half, :], -k[..., :half, :].flip(-2)], dim=-2)


def _huge(k: Tensor, last: int) -> Tensor:
    """A huge key, and its negative at another place."""
    k = k.clone()
    k[..., 0, :] *= 1e4
    k[..., last, :] = -k[..., 0, :]
    return k


# Keys [..., S, D], by which others they are replaced.
CANCELLING: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": _halves,
    "alternating": _alternating,
    "back and forth": _back_and_forth,
    "a huge one, and back at the end": lambda k: _huge(k, -1),
    "a huge one, and back soon": lambda k: _huge(k, k.shape[-2] // 3),
    "the same key with both signs": lambda k: _halves(k[..., :1, :].expand_as(k)),
    "none": lambda k: k,
}


class Exact(NamedTuple):
    """The row sums in float64, and the size of their rounding errors in another type.

    Attributes:
        out: the output [B, H, T, E].
        total: the denominator [B, H, T].
        rounding: of the denominator, and of the numerator in units of the largest value.
        largest: value of each row's head, [B, H, 1].
    """

    out: Tensor
    total: Tensor
    rounding: Tensor
    largest: Tensor


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: sr.AttentionSpec,
    causal: bool,
    log_decay: Tensor | None,
    coefficients: Tensor | None,
    eps: float,
) -> Exact:
    """Pair by pair, for decays per token or channel."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    q, k = (FEATURE_MAPS[spec.feature_map](x) for x in (q, k))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    parts = spec.score_scale(q.shape[3]) * q.unsqueeze(3) * k.unsqueeze(2)  # [B, H, T, S, D]
    fade = torch.ones(queries, keys, dtype=torch.float64)
    fade = fade.tril(keys - queries) if causal else fade
    if log_decay is not None:
        faded = differences(log_decay.double(), queries).exp().repeat_interleave(group, 1)
        if spec.decay == "channel":
            parts = parts * faded
        else:
            fade = fade * faded
    weights = PowerSeries.known_part(spec).coefficients
    if coefficients is not None:
        weights = coefficients.double()[:, :, None].unbind(1)
    assert weights is not None
    scores, sizes = parts.sum(-1), parts.abs().sum(-1)
    series, rounding = torch.zeros_like(scores), torch.zeros_like(scores[..., 0])
    for n, weight in enumerate(weights):
        size = torch.as_tensor(weight).abs()
        series = series + torch.as_tensor(weight).unsqueeze(-1) * scores**n
        rounding = rounding + size * (fade * sizes**n).sum(-1)  # of pairs
        if n:  # of sums of monomials (magnitudes.py)
            channels = (fade.unsqueeze(-1) * parts.abs() ** n).sum(3) ** (2 / n)
            rounding = rounding + size * math.sqrt(math.factorial(n)) * channels.sum(-1) ** (n / 2)
    series = series * fade
    total = series.sum(-1)
    if spec.row_sum is not None:
        total = total + spec.row_sum.offset
    out = series @ v / total.unsqueeze(-1)
    # What is below the range of float32 has lost digits, or is 0 on processors that say so.
    rounding = eps * rounding + keys * torch.finfo(torch.float32).tiny
    return Exact(out, total, rounding, v.abs().amax((2, 3)).unsqueeze(2))
