"""The fused form: the series exp on PyTorch's fused kernels, with their speed and memory use.

It computes the sums of equations 1, 5 and 6 (``reference.exp_sum``) for every exp variant without
a clamp, window or decay, on a CPU or a GPU. docs/numerics.md explains the identities that it uses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, visible, without_autocast
from softmax_rnn.ops.spec import AttentionSpec

_aten = torch.ops.aten
MAX_WIDTH = 256  # of the flash kernels of a GPU


def has_flash(device: torch.device) -> bool:
    """Whether PyTorch has flash kernels for a GPU."""
    available = torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability(device) >= (8, 0)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool,
    mask: Tensor | None,
) -> RowSums:
    """As :func:`softmax_rnn.ops.forms.pairs.dense.dense`, on the fused kernels; never overflows."""
    scale = spec.score_scale(q.shape[-1])
    q, k = q.to(v.dtype), k.to(v.dtype)  # the kernels need one dtype; features may be wider
    queries, keys, width = q.shape[-2], k.shape[-2], v.shape[-1]
    on_gpu = q.is_cuda and not spec.up_to_row_scale
    if scale < 0:  # the kernels also multiply the mask by the scale
        q, scale = -q, -scale
    if queries == 1 and causal:
        causal = False  # the query at the last position sees every key
    if causal and (mask is not None or queries != keys) and not on_gpu:
        # The kernels take either a mask or is_causal, which aligns queries to the first keys. A
        # GPU's flash kernel aligns them to the last keys, as this package does; it takes no mask.
        mask, causal = visible(queries, keys, True, mask, q.device), False
    # The kernels need keys and values of equal width. Padding with zeros changes no score; in the
    # output it is removed.
    padded = max(q.shape[-1], width)
    if on_gpu:  # widths must be multiples of 8
        padded += -padded % 8
    if not q.shape[-1] == width == padded:
        q, k, v = (F.pad(x, (0, padded - x.shape[-1])) for x in (q, k, v))
    small = spec.norm != "none" and v.dtype == torch.float16
    unit = _power_of_two(v) if small else None
    if unit is not None:
        v = v * unit.to(v.dtype)
    q, k, v = first_order(*(_contiguous_rows(x) for x in (q, k, v)))
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], queries, keys)
    if spec.up_to_row_scale:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
        )
        return RowSums(_divided(out[..., :width], unit))
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    numerator, weight_sum, log_scale = _FlashSums.apply(q, k, v, mask, causal, scale, on_gpu)
    return RowSums(_divided(numerator[..., :width], unit), weight_sum, log_scale)


def _power_of_two(v: Tensor) -> Tensor:
    """A factor [B, Hkv, 1, 1] by which the largest of small float16 values is about 1."""
    largest = v.detach().abs().amax((2, 3), keepdim=True).float()
    exponent = -largest.log2().floor().clamp(min=-15, max=0)  # 2^16 is out of range
    return exponent.masked_fill(largest == 0, 0.0).nan_to_num(0.0).exp2()


def _divided(sums: Tensor, unit: Tensor | None) -> Tensor:
    """Sums without the factor of their values, in float32."""
    if unit is None:
        return sums
    return sums.float() / unit.repeat_interleave(sums.shape[1] // unit.shape[1], 1)


def _contiguous_rows(x: Tensor) -> Tensor:
    # The flash kernels assume contiguous rows and do not check it. SDPA would fall back to its
    # quadratic kernel.
    return x if x.stride(-1) == 1 else x.contiguous()


class _FlashSums(torch.autograd.Function):
    """(q, k, v) -> (softmax output, ones, log-sum-exp); the last has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, *random = _flash(q, k, v, mask, *options)
        weight_sum = torch.ones_like(lse)
        if mask is not None:
            # For a row that sees no key the kernel returns lse = 0, but the weight sum is zero.
            weight_sum *= mask.isfinite().any(-1)
        ctx.save_for_backward(q, k, v, mask, lse, *random)
        ctx.options = options[:2]
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, weight_sum, lse

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, mask, lse, *random = ctx.saved_tensors
        if grad is None:
            grad = q.new_zeros(*q.shape[:-1], v.shape[-1])
        grad = _contiguous_rows(grad)
        out = torch.zeros_like(grad)
        if grad_sum is not None:
            # Any `out` with rowsum(grad * out) = -grad_sum works; this one is parallel to grad.
            largest = grad.abs().amax(-1, keepdim=True).to(lse.dtype)
            largest = largest.masked_fill(largest == 0, 1)
            direction = grad / largest
            length = direction.square().sum(-1, keepdim=True)
            length = length.masked_fill(length == 0, 1)
            out = (-direction * (grad_sum.unsqueeze(-1) / largest / length)).to(grad.dtype)
        tensors = (grad, q, k, v, out, lse)
        return *_flash_backward(tensors, random, mask, *ctx.options), None, None, None, None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, on_gpu: bool
) -> tuple[Tensor, ...]:
    """Softmax output and log-sum-exp; on a GPU also the dropout state for the backward pass."""
    if not on_gpu:
        flash = _aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    assert mask is None
    flash = _aten._scaled_dot_product_flash_attention
    out, lse, _, _, _, _, seed, offset, _ = flash(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse, seed, offset


def _flash_backward(
    tensors: tuple[Tensor, ...],
    random: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; ``tensors`` are grad, q, k, v, out and lse."""
    if not random:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
    backward = _aten._scaled_dot_product_flash_attention_backward
    packed = (None, None)  # offsets of packed sequences: not used
    lengths = (tensors[1].shape[2], tensors[2].shape[2])
    return backward(*tensors, *packed, *lengths, 0.0, causal, *random, scale=scale)
