"""The exponential on PyTorch's fused kernels, at their speed and memory.

Three identities (docs/design.md) carry every exp variant without a clamp:

1. A norm that ignores positive scale gives the same for the numerator as for softmax's output.
2. ``N = out * exp(lse)`` with the kernel's output and log-sum-exp.
3. The kernel's backward subtracts ``delta = rowsum(grad_out * out)``, which is nothing but the
   gradient through the denominator. With numerator ``out``, weight sum 1 and log-scale ``lse``
   (constant), the gradient of the weight sum takes its place: ``delta = -grad_weight_sum``.
   Zero gives the un-normalised sum and the paper's detached denominator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.forms.row_sums import RowSums, in_own_precision, visible
from softmax_rnn.spec import AttentionSpec

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def supports(spec: AttentionSpec, device: str) -> bool:
    """Exp without a clamp; on devices other than the CPU only where a row's scale is free."""
    unclamped_exp = spec.series == "exp" and spec.clamp is None
    return unclamped_exp and (spec.up_to_row_scale or device == "cpu")


def fused(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, causal: bool, mask: Tensor | None
) -> RowSums:
    """As :func:`softmax_rnn.forms.dense.dense`, on the fused kernels; never overflows."""
    queries, keys, width = q.shape[-2], k.shape[-2], v.shape[-1]
    scale = spec.score_scale(q.shape[-1])
    if scale < 0:  # the kernels multiply the mask by it too
        q, scale = -q, -scale
    if queries == 1 and causal:
        causal = False  # the one query is aligned to the last key: it sees all
    if causal and (mask is not None or queries != keys):
        # The kernels take either their own triangle, aligned to the first keys, or a mask.
        mask, causal = visible(queries, keys, True, mask, q.device), False
    # The kernels want keys and values of one width; zeros change no score and no used value.
    if q.shape[-1] != width:
        padded = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, padded - x.shape[-1])) for x in (q, k, v))
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], queries, keys)
    if spec.up_to_row_scale:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return RowSums(out[..., :width])
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    numerator, weight_sum, log_scale = _FlashSums.apply(q, k, v, mask, causal, scale)
    return RowSums(numerator[..., :width], weight_sum, log_scale)


class _FlashSums(torch.autograd.Function):
    """(q, k, v) -> (softmax output, ones, log-sum-exp), the last one a constant."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        if mask is not None:
            # A row that sees no key: the kernel says lse = 0, but its weights sum to zero.
            seen = mask.isfinite().any(-1).expand_as(lse)
            weight_sum = seen.to(lse.dtype)
        else:
            weight_sum = torch.ones_like(lse)
        ctx.save_for_backward(q, k, v, mask, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, weight_sum, lse

    @staticmethod
    @once_differentiable
    @in_own_precision
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, mask, lse = ctx.saved_tensors
        if grad is None:
            grad = q.new_zeros(*q.shape[:-1], v.shape[-1])
        # Any `out` with rowsum(grad * out) = -grad_sum will do: the one along grad.
        if grad_sum is None:
            out = torch.zeros_like(grad)
        else:
            largest = grad.abs().amax(-1, keepdim=True).to(lse.dtype)
            largest = largest.masked_fill(largest == 0, 1)
            direction = grad / largest
            length = direction.square().sum(-1, keepdim=True)
            length = length.masked_fill(length == 0, 1)
            out = (-direction * (grad_sum.unsqueeze(-1) / largest / length)).to(grad.dtype)
        grads = _flash_backward(
            grad, q, k, v, out, lse, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        return (*grads, None, None, None)
