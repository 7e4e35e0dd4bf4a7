"""The dense form: all weights at once, quadratic in time and memory.

It computes the sums of ``formula.attention``, and so equations 1 to 6, for every spec. Tests
compare the other forms with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_rnn.ops.decay import differences
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, visible
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> RowSums:
    """The sums, from all weights as one tensor [B, H, T, S]; autograd computes the gradients.

    Args:
        q: feature-mapped queries [B, H, T, D].
        k: feature-mapped keys [B, Hkv, S, D].
        v: values [B, Hkv, S, E].
        spec: gives scale, clamp, series and window.
        causal: whether query ``t`` sees keys up to ``t + S - T`` only.
        mask: boolean, True = visible, broadcastable to [B, H, T, S].
        log_decay: <= 0, float64, [B, Hkv, S] or per channel [B, Hkv, S, D]; causal only.
        coefficients: of a learned polynomial, [H, N + 1].
    """
    dtype = compute_dtype(q.dtype)
    groups = q.shape[1] // k.shape[1]
    q = q.to(dtype)
    k = k.to(dtype).repeat_interleave(groups, dim=1)
    v = v.to(dtype).repeat_interleave(groups, dim=1)
    scale = spec.score_scale(q.shape[-1])
    fading = None  # G_t - G_s, of weights or of the channels of a score
    if log_decay is not None:
        fading = differences(log_decay.repeat_interleave(groups, dim=1), q.shape[-2]).to(dtype)
    if spec.decay == "channel":
        assert fading is not None
        scores = scale * (q.unsqueeze(-2) * k.unsqueeze(-3) * fading.exp()).sum(-1)
        fading = None
    else:
        scores = scale * (q @ k.transpose(-1, -2))
    if spec.clamp is not None:
        scores = scores.clamp(max=spec.clamp)
    if spec.shifted and fading is not None:
        scores, fading = scores + fading, None
    queries, keys = q.shape[-2], k.shape[-2]
    window = spec.hiding_window, spec.global_keys
    shown = visible(queries, keys, causal, mask, q.device, *window)
    if shown is not None:
        scores = scores.masked_fill(~shown, -torch.inf if spec.shifted else 0.0)
    largest = None
    if spec.shifted and k.shape[-2]:
        largest = scores.detach().amax(-1)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        scores = scores - largest.unsqueeze(-1)
    if coefficients is not None:
        coefficients = coefficients.to(dtype)[:, None, None]
    weights = PowerSeries.from_spec(spec, coefficients)(scores)
    if fading is not None:
        weights = weights * fading.exp()
    if shown is not None:
        weights = weights.masked_fill(~shown, 0.0)
    return RowSums(weights @ v, weights.sum(-1), largest)
