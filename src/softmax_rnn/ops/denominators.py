"""The row-sum denominators, kept away from zero."""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import RowSums
from softmax_rnn.ops.spec import AttentionSpec

# A quotient whose row sum crosses zero is at most 1 / SUM_GUARD times the largest value.
SUM_GUARD = 1e-6

# The largest exponential of a sink: below infinity, which has NaN gradients, and with room for the
# sum that it is added to.
_MAX_SINK = {torch.float32: 87.0, torch.float64: 708.0}


def row_sum(
    sums: RowSums, spec: AttentionSpec, v: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The denominator ``D`` [B, H, T], and ``r <= 0`` or ``None`` for 0; ``sink`` is [H].

    The quotient is ``numerator / D * exp(r)``. Only specs with a norm have an ``r``.
    """
    rule, scale = spec.row_sum, sums.log_scale
    assert rule is not None
    total, remaining = _without_noise(sums, spec), None
    if rule.detached:
        total = total.detach()
    size = total.detach().abs()  # magnitude of the terms
    if not rule.plain:
        unit = torch.ones_like(total)
        if scale is not None:
            # A norm enlarges values that are small relative to offset or floor.
            if spec.norm != "none":
                remaining = scale.clamp(max=0.0)
                total, scale = total * remaining.exp(), scale - remaining
            unit = (-scale).exp()
        if rule.offset:  # unit may be infinite, and 0 * infinity is NaN
            total, size = total + rule.offset * unit, size + rule.offset * unit
        if sink is not None:
            height = sink.to(total.dtype).unsqueeze(-1)
            height = height if scale is None else height - scale
            added = height.clamp(max=_MAX_SINK[total.dtype]).exp()
            total, size = total + added, size + added.detach()
        if rule.floor:
            total = total.maximum(rule.floor * unit)
    if not (spec.sign_definite or rule.floor):
        if sums.noise is None and v.numel():
            largest = v.detach().abs().amax((2, 3)).to(total.dtype)  # largest value per head
            largest = largest.repeat_interleave(total.shape[1] // v.shape[1], dim=1).unsqueeze(-1)
            minimum = SUM_GUARD * sums.numerator.detach().abs().amax(-1) / largest
            minimum = minimum if remaining is None else minimum * remaining.exp()
        else:  # the values summed in a state are unknown
            minimum = torch.finfo(size.dtype).eps * size
        total = torch.where(total.abs() < minimum, minimum * _sign(total), total)
    empty = sums.weight_sum == 0  # no visible key, or all weights zero: 0 / 1
    return total.masked_fill(empty & (total == 0), 1.0), remaining


def _without_noise(sums: RowSums, spec: AttentionSpec) -> Tensor:
    """The weight sum, at least its rounding error.

    A smaller sum is noise, and so is its numerator.
    """
    total, noise = sums.weight_sum, sums.noise
    assert total is not None
    if noise is None:
        return total
    minimum = noise if spec.sign_definite else noise * _sign(total)
    lost = total < noise if spec.sign_definite else total.abs() < noise
    return torch.where(lost & (noise > 0), minimum, total)


def _sign(x: Tensor) -> Tensor:
    """-1 below zero, else 1."""
    return torch.ones_like(x).masked_fill(x < 0, -1.0)
