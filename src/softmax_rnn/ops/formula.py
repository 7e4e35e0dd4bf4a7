"""The whole formula in loops: what every form is held to. docs/design.md explains it.

``attention`` computes every option of :class:`AttentionSpec`, one pair of query and key at a time:
decays, windows, masks, gates, denominators, sinks, norms. Tests compare every form with it, and its
gradients with theirs. It is slow and may overflow; use float64. ``reference.py`` has the paper's
equations by themselves, and the letters of shapes.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from softmax_rnn.ops.spec import AttentionSpec


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    length_power: Tensor | None = None,
    log_decay: Tensor | None = None,
    backward_log_decay: Tensor | None = None,
    coefficients: Tensor | None = None,
    sink: Tensor | None = None,
    outside_scale: Tensor | None = None,
    outside_q: Tensor | None = None,
    outside_k: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """The formula of :class:`AttentionSpec` in loops; arguments as :func:`softmax_rnn.attention`.

    With the score ``x_ts = scale * phi(q_t) . phi(k_s)``, clamped from above::

        w_ts = f(x_ts) * exp(g_{s+1} + ... + g_t)          s <= t
        w_ts = f(x_ts) * exp(b_t + ... + b_{s-1})          s > t; by default b_i = g_{i+1}
        N_t = sum_{s visible} w_ts * g_in[s] * v_s
        o_t = norm(g_out[t] * N_t / D_t)   or   g_out[t] * norm(N_t / D_t)

    A decay per channel multiplies the channels of ``phi(q_t) * phi(k_s)`` instead of ``w_ts``. With
    a series outside the window, ``f`` is exp for the keys inside it and the first keys; for the
    others, ``q`` and ``k`` are ``outside_q`` and ``outside_k``.

    Returns:
        [B, H, T, E]. A row that sees no key has ``N_t = 0`` and no denominator.
    """
    (B, H, T, _), (_, Hkv, S, E) = q.shape, v.shape
    group = H // Hkv
    far_q = q if outside_q is None else outside_q
    far_k = k if outside_k is None else outside_k
    shown = torch.ones(B, H, T, S, dtype=torch.bool)
    if mask is not None:
        shown = shown & mask
    out = torch.zeros(B, H, T, E, dtype=q.dtype)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        hkv = h // group
        position = t + S - T  # of the query among the keys
        own_coefficients = None if coefficients is None else coefficients[h]
        first = (shown[b].any(0).any(0).nonzero().flatten()[: spec.global_keys]).tolist()
        shown_to_group = shown[b, hkv * group : (hkv + 1) * group].any(0).any(0)
        log_decays = decays_of_head(spec, log_decay, b, hkv, shown_to_group)
        backward = decays_of_head(spec, backward_log_decay, b, hkv, shown_to_group)
        numerator = torch.zeros(E, dtype=q.dtype)
        weight_sum = torch.zeros((), dtype=q.dtype)
        length = 0
        for s in range(S):
            if not shown[b, h, t, s] or (causal and s > position):
                continue
            in_window = spec.window is None or abs(s - position) < spec.window
            inside = in_window or (s in first and s <= position)
            if not inside and spec.outside == "hidden":
                continue
            if s <= position:  # all decays after the key's, up to the query's own
                fade = log_decays[s + 1 : position + 1].sum(0).exp()
            elif backward_log_decay is not None:  # the same of the reversed sequence
                fade = backward[position:s].sum(0).exp()
            else:
                fade = log_decays[position + 1 : s + 1].sum(0).exp()
            of_channels, of_weight = (fade, 1.0) if spec.decay == "channel" else (1.0, fade)
            all_q, all_k = (q, k) if inside else (far_q, far_k)
            product = feature(spec, all_q[b, h, t]) * feature(spec, all_k[b, hkv, s])
            x = score_scale(spec, len(product)) * (product * of_channels).sum()
            if inside and spec.outside == "series":
                w = x.exp()
            else:
                w = weight(spec, x, own_coefficients)
            if not inside and outside_scale is not None:
                w = outside_scale[h] * w
            w = w * of_weight
            gate_in = 1.0 if input_gate is None else input_gate[b, hkv, s]
            numerator = numerator + w * gate_in * v[b, hkv, s]
            weight_sum = weight_sum + w
            length += 1
        row = numerator
        if length:
            power = None if length_power is None else length_power[h]
            height = None if sink is None else sink[h]
            row = row / denominator(spec, weight_sum, length, power, height)
        gate_out = 1.0 if output_gate is None else output_gate[b, h, t]
        if spec.output_gate == "before_norm":
            row = norm(spec, gate_out * row, norm_weight, norm_bias)
        else:
            row = gate_out * norm(spec, row, norm_weight, norm_bias)
        out[b, h, t] = row
    return out


def decays_of_head(
    spec: AttentionSpec, log_decay: Tensor | None, b: int, hkv: int, shown: Tensor
) -> Tensor:
    """The log decays [S] or [S, D] of one head's keys; 0 for keys that no query head sees."""
    if log_decay is None:
        return torch.zeros(len(shown))
    each = log_decay[hkv].expand(len(shown)) if spec.decay == "head" else log_decay[b, hkv]
    return each * shown.view(-1, *[1] * (each.ndim - 1))


def score_scale(spec: AttentionSpec, width: int) -> float:
    """``1 / sqrt(d)`` for the identity map, 1 for the others, unless the spec sets a number."""
    if isinstance(spec.scale, int | float):
        return spec.scale
    mapped = spec.scale is None and spec.feature_map != "identity"
    return 1.0 if mapped else 1 / math.sqrt(width)


def feature(spec: AttentionSpec, x: Tensor) -> Tensor:
    """``phi`` of one vector."""
    if spec.feature_map == "identity":
        return x
    if spec.feature_map == "elu1":
        return torch.where(x > 0, x + 1, x.exp())
    if spec.feature_map == "relu":
        return x.relu()
    return x / x.norm()


def weight(spec: AttentionSpec, x: Tensor, coefficients: Tensor | None = None) -> Tensor:
    """``f`` of a score: exp, a single power, exp's series up to an order, or any polynomial."""
    if spec.clamp is not None:
        x = x.clamp(max=spec.clamp)
    if spec.series == "exp":
        return x.exp()
    assert spec.order is not None
    if spec.series == "power":
        return x**spec.order
    if spec.series == "polynomial":
        factors: Any = spec.coefficients if coefficients is None else coefficients
    else:
        assert spec.series == "taylor"
        factors = [1 / math.factorial(n) for n in range(spec.order + 1)]
    return sum((a * x**n for n, a in enumerate(factors)), torch.zeros_like(x))


def denominator(
    spec: AttentionSpec,
    weight_sum: Tensor,
    length: int,
    length_power: Tensor | None,
    sink: Tensor | None = None,
) -> Tensor | float:
    """``D_t``, from the sum of weights and the number of visible keys."""
    if spec.denominator == "learned_length":
        assert length_power is not None
        return length**length_power
    total = weight_sum + spec.epsilon
    if spec.floor:
        total = total.clamp(min=spec.floor)
    choices: dict[str, Tensor | float] = {
        "sum": total,
        "detached_sum": total.detach(),
        "clamped_sum": weight_sum.clamp(min=1.0),
        "sum_plus_one": weight_sum + 1,
        "sum_plus_sink": weight_sum if sink is None else weight_sum + sink.exp(),
        "length": float(length),
        "none": 1.0,
    }
    return choices[spec.denominator]


def norm(spec: AttentionSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of one output vector; RMS and layer norms have a weight and a bias [e] after it."""
    if spec.norm == "l2":
        return x / x.norm() if x.any() else x
    if spec.norm == "layer":
        x = x - x.mean()
    if spec.norm in ("rms", "layer"):
        eps = {"layer": 1e-5, "rms": 2.0**-23}[spec.norm]
        x = x / (x.pow(2).mean() + eps).sqrt()
    x = x if weight is None else weight * x
    return x if bias is None else x + bias
