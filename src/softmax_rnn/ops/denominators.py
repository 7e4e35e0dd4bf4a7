"""The row-sum denominators, kept away from zero."""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import RowSums
from softmax_rnn.ops.spec import AttentionSpec

# A quotient whose row sum crosses zero is at most 1 / SUM_GUARD times the largest value.
SUM_GUARD = 1e-6


def row_sum(sums: RowSums, spec: AttentionSpec, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """The denominator of the numerator in ``sums``, [B, H, T]; and the log of what is left to do.

    Args:
        sums: with a weight sum.
        spec: with a row sum.
        v: values [B, Hkv, S, E].

    Returns:
        ``D`` and, where a norm follows, ``r <= 0``: the quotient is ``numerator / D * exp(r)``.
    """
    rule, scale = spec.row_sum, sums.log_scale
    assert rule is not None
    total, rest = _without_noise(sums, spec), None
    if rule.detached:
        total = total.detach()
    size = total.detach().abs()  # of what is added up
    if rule.offset or rule.floor:
        unit = torch.ones_like(total)
        if scale is not None:
            if spec.norm != "none":  # which brings back what is small beside the offset or floor
                rest = scale.clamp(max=0.0)
                total, scale = total * rest.exp(), scale - rest
            unit = (-scale).exp()
        if rule.offset:  # 0 times a unit may be 0 times infinity
            total, size = total + rule.offset * unit, size + rule.offset * unit
        if rule.floor:
            total = total.maximum(rule.floor * unit)
    if not (spec.sign_definite or rule.floor):
        if sums.noise is None and v.numel():
            least = SUM_GUARD * sums.numerator.detach().abs().amax(-1) / _largest(v, total)
            least = least if rest is None else least * rest.exp()
        else:  # a state has seen values that nobody knows
            least = torch.finfo(size.dtype).eps * size
        total = torch.where(total.abs() < least, least * _sign(total), total)
    nothing = sums.weight_sum == 0  # no visible key, or no weight: 0 / 1
    return total.masked_fill(nothing & (total == 0), 1.0), rest


def _without_noise(sums: RowSums, spec: AttentionSpec) -> Tensor:
    """The weight sum; below its rounding error it is noise, as is the numerator, and small."""
    total, noise = sums.weight_sum, sums.noise
    assert total is not None
    if noise is None:
        return total
    least = noise if spec.sign_definite else noise * _sign(total)
    lost = total < noise if spec.sign_definite else total.abs() < noise
    return torch.where(lost & (noise > 0), least, total)


def _largest(v: Tensor, like: Tensor) -> Tensor:
    """The largest value of each head, [B, H, 1]."""
    largest = v.detach().abs().amax((2, 3)).to(like.dtype)
    return largest.repeat_interleave(like.shape[1] // v.shape[1], dim=1).unsqueeze(-1)


def _sign(x: Tensor) -> Tensor:
    """-1 below zero, else 1."""
    return torch.ones_like(x).masked_fill(x < 0, -1.0)
