"""From sums to outputs: the denominator (kept away from zero), the gate and the norm."""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, visible_count
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.norms import normalized
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import largest_values

# A quotient whose row sum crosses zero is at most 1 / SUM_GUARD times the largest value.
SUM_GUARD = 1e-6

# The largest exponential of a sink: below infinity, which has NaN gradients, and with room for the
# sum that it is added to.
_MAX_SINK = {torch.float32: 87.0, torch.float64: 708.0}


def outputs(sums: RowSums, call: Call) -> tuple[Tensor, Tensor | None]:
    """The outputs [B, H, T, E] in the dtype of sums; the largest |v| [B, Hkv], if needed."""
    spec, rule = call.spec, call.spec.row_sum
    dtype, log_scale, largest = compute_dtype(call.q.dtype), sums.log_scale, None
    out = sums.numerator.to(dtype)
    if sums.magnitudes is not None or (rule is not None and guarded(sums, spec)):
        largest = largest_values(call.v, call.mask, call.state)
    if rule is not None:
        if sums.weight_sum is not None:  # else the form has already divided by it
            total, log_scale = row_sum(sums, spec, largest, call.sink)
            out = out / total.unsqueeze(-1)
    elif spec.denominator != "none":
        out = out / _length(call).to(dtype).unsqueeze(-1)
    gate = None
    if call.output_gate is not None:
        gate = call.output_gate.to(dtype)
        gate = gate if gate.ndim == 4 else gate.unsqueeze(-1)
        if spec.output_gate == "before_norm":
            out = out * gate
    if spec.norm != "none" or log_scale is not None:
        out = normalized(out, log_scale, spec.norm, call.norm_weight, call.norm_bias)
    if gate is not None and spec.output_gate == "after_norm":
        out = out * gate
    return out, largest


def _length(call: Call) -> Tensor:
    """The number of keys that each query sees, at least 1, to its power if it has one."""
    spec, queries, keys = call.spec, call.q.shape[2], call.k.shape[2]
    window = spec.hiding_window, spec.global_keys
    length = visible_count(queries, keys, call.causal, call.mask, call.q.device, *window)
    if call.state is not None:
        length = length + call.state.visible[:, None, None]
    length = length.clamp(min=1)
    if call.length_power is None:
        return length
    dtype = compute_dtype(call.q.dtype)
    return length.to(dtype) ** call.length_power.to(dtype).unsqueeze(-1)


def guarded(sums: RowSums, spec: AttentionSpec) -> bool:
    """Whether the row sum is compared with the values, as its terms may cancel."""
    rule = spec.row_sum
    assert rule is not None
    if sums.weight_sum is None or rule.floor:
        return False
    return sums.noise is not None or not spec.sign_definite


def row_sum(
    sums: RowSums, spec: AttentionSpec, largest: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The denominator ``D`` [B, H, T], and ``remaining <= 0`` or ``None`` for 0; ``sink`` is [H].

    ``largest`` [B, Hkv] are the largest absolute values, if the row sum is :func:`guarded`. The
    quotient is ``numerator / D * exp(remaining)``; without a norm nothing remains. A row sum below
    its rounding error is set to that error: it is noise, and so is its numerator.
    """
    rule, scale = spec.row_sum, sums.log_scale
    assert rule is not None
    total, remaining = sums.weight_sum, None
    assert total is not None
    if rule.detached:
        total = total.detach()
    if not rule.plain:
        unit = torch.ones_like(total)
        if scale is not None:
            # A norm enlarges values that are small relative to offset or floor.
            if spec.norm != "none":
                remaining = scale.clamp(max=0.0)
                total, scale = total * remaining.exp(), scale - remaining
            unit = (-scale).exp()
        if rule.offset:  # unit may be infinite, and 0 * infinity is NaN
            total = total + rule.offset * unit
        if sink is not None:
            height = sink.to(total.dtype).unsqueeze(-1)
            height = height if scale is None else height - scale
            total = total + height.clamp(max=_MAX_SINK[total.dtype]).exp()
    bare = total
    if rule.floor:
        total = total.maximum(rule.floor * unit)
    minimum = sums.noise
    if guarded(sums, spec):
        assert largest is not None
        largest = largest.repeat_interleave(total.shape[1] // largest.shape[1], 1).unsqueeze(-1)
        least = SUM_GUARD * sums.numerator.detach().abs().amax(-1) / largest
        minimum = least if minimum is None else least.fmax(minimum)  # 0 / 0 for values of 0
    if minimum is not None:
        minimum = minimum if remaining is None else minimum * remaining.exp()
        small = (total if spec.sign_definite else total.abs()) < minimum
        if rule.floor:  # a sum that is certainly below it is no noise
            small &= bare > -minimum
        sign = 1.0 if spec.sign_definite else torch.ones_like(total).masked_fill(total < 0, -1.0)
        total = torch.where(small, minimum * sign, total)
    empty = sums.weight_sum == 0  # no visible key, or all weights zero: 0 / 1
    return total.masked_fill(empty & (total == 0), 1.0), remaining
