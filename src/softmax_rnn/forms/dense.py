"""The definition, quadratic in time and memory: the oracle of every test."""

from __future__ import annotations

from torch import Tensor

from softmax_rnn.forms.row_sums import RowSums, compute_dtype, visible
from softmax_rnn.series import PowerSeries
from softmax_rnn.spec import AttentionSpec


def dense(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, causal: bool, mask: Tensor | None
) -> RowSums:
    """Every weight at once, [B, H, T, S], left to autograd.

    Args:
        q: feature-mapped queries [B, H, T, D].
        k: feature-mapped keys [B, Hkv, S, D].
        v: values [B, Hkv, S, E].
        spec: gives scale, clamp and series.
        causal: whether query ``t`` sees keys up to ``t + S - T`` only.
        mask: boolean, True = visible, broadcastable to [B, H, T, S].

    Raises:
        OverflowError: if a sum of exponentials is not finite.
    """
    dtype = compute_dtype(q.dtype)
    groups = q.shape[1] // k.shape[1]
    q = q.to(dtype)
    k = k.to(dtype).repeat_interleave(groups, dim=1)
    v = v.to(dtype).repeat_interleave(groups, dim=1)
    scores = spec.score_scale(q.shape[-1]) * (q @ k.transpose(-1, -2))
    if spec.clamp is not None:
        scores = scores.clamp(max=spec.clamp)
    shown = visible(q.shape[-2], k.shape[-2], causal, mask, q.device)
    if shown is not None:
        scores = scores.masked_fill(~shown, 0.0)
    weights = PowerSeries.of(spec)(scores)
    if shown is not None:
        weights = weights.masked_fill(~shown, 0.0)
    weight_sum = weights.sum(-1)
    if spec.order is None and not weight_sum.isfinite().all():
        raise OverflowError(
            f"The dense form's sums overflow {dtype}: its largest score is "
            f"{scores.max().item():.1f}. Use form='fused' or 'blocked', clamp=, or float64."
        )
    return RowSums(weights @ v, weight_sum)
