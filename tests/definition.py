"""The formula of ``AttentionSpec``, written out row by row in float64: what dense is held to.

Nothing here comes from the package but the specification: the sums are loops, the series are sums
of powers, the norms are the textbook's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softmax_rnn import AttentionSpec


def _feature(spec: AttentionSpec, x: Tensor) -> Tensor:
    if spec.feature_map == "identity":
        return x
    if spec.feature_map == "elu1":
        return torch.where(x > 0, x + 1, x.exp())
    if spec.feature_map == "relu":
        return x.clamp(min=0)
    return x / x.norm()


def _weight(spec: AttentionSpec, s: Tensor) -> Tensor:
    if spec.clamp is not None:
        s = s.clamp(max=spec.clamp)
    if spec.series == "exp":
        return s.exp()
    assert spec.order is not None
    if spec.series == "power":
        return s**spec.order
    return sum((s**n / math.factorial(n) for n in range(spec.order + 1)), torch.zeros_like(s))


def _norm(spec: AttentionSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if spec.norm == "l2":
        return x / x.norm() if x.any() else x
    if spec.norm == "layer":
        x = x - x.mean()
    if spec.norm in ("rms", "layer"):
        eps = {"layer": 1e-5, "rms": 2.0**-23}[spec.norm]
        x = x / (x.pow(2).mean() + eps).sqrt()
    x = x if weight is None else weight * x
    return x if bias is None else x + bias


def attention_by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool,
    mask: Tensor | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    length_power: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """``softmax_rnn.attention``, one row at a time."""
    batch, heads, queries, width = q.shape
    keys, groups = k.shape[2], heads // k.shape[1]
    inverse_sqrt = 1 / math.sqrt(width)
    default = inverse_sqrt if spec.feature_map == "identity" else 1.0
    scale = {None: default, "1/sqrt(d)": inverse_sqrt}.get(spec.scale, spec.scale)
    shown = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if mask is not None:
        shown = shown & mask
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=q.dtype)
    rows = [(b, h, t) for b in range(batch) for h in range(heads) for t in range(queries)]
    for b, h, t in rows:
        numerator = torch.zeros(v.shape[-1], dtype=q.dtype)
        weight_sum = torch.zeros((), dtype=q.dtype)
        length = 0
        for s in range(keys):
            if not shown[b, h, t, s] or (causal and s > t + keys - queries):
                continue
            score = scale * _feature(spec, q[b, h, t]) @ _feature(spec, k[b, h // groups, s])
            w = _weight(spec, score)
            gate = 1.0 if input_gate is None else input_gate[b, h // groups, s]
            numerator = numerator + w * gate * v[b, h // groups, s]
            weight_sum = weight_sum + w
            length += 1
        row = numerator
        if length:
            row = row / _denominator(spec, weight_sum, length, length_power, h)
        gate_out = 1.0 if output_gate is None else output_gate[b, h, t]
        if spec.output_gate == "before_norm":
            row = _norm(spec, gate_out * row, norm_weight, norm_bias)
        else:
            row = gate_out * _norm(spec, row, norm_weight, norm_bias)
        out[b, h, t] = row
    return out


def _denominator(
    spec: AttentionSpec, weight_sum: Tensor, length: int, length_power: Tensor | None, head: int
) -> Tensor | float:
    total = weight_sum + spec.epsilon
    if spec.floor:
        total = total.clamp(min=spec.floor)
    if spec.denominator == "learned_length":
        assert length_power is not None
        return length ** length_power[head]
    return {
        "sum": total,
        "detached_sum": total.detach(),
        "clamped_sum": weight_sum.clamp(min=1.0),
        "sum_plus_one": weight_sum + 1,
        "length": float(length),
        "none": 1.0,
    }[spec.denominator]
