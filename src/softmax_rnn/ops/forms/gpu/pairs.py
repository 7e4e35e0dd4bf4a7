"""The triton form: the blocked form as Triton kernels, for any series on a GPU.

It computes the sums of ``formula.attention``, and so equations 1 to 6. Memory is linear in the
length: in both passes scores and features stay on the chip. Only q, k, v are saved, the running
sums of the log decays, and the row maxima if exp might overflow. With a window the time is linear,
too. Decays skip no tiles, since only their values tell which weights are zero. The kernels are
imported at the first call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.compiler import uncompiled
from softmax_rnn.ops.decay import log_decay_grad
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, first_visible
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec

MAX_WIDTH = 256
MAX_FLOAT64_COSINE = 128  # wider tiles exceed the shared memory of an A100
MAX_ORDER = 64  # of a series, since Horner's rule is unrolled
# Choices for the autotuner: rows of the resident tile and of the tiles it is multiplied with, warps
# and pipeline stages. The key is the size of a row of factors in bytes (doubled without tensor
# cores). The last choice of each key fits the shared memory of compute capabilities 8.0 and 9.0.
_TILES = {
    128: [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)],
    256: [(128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)],
    512: [(64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)],
    1024: [(32, 32, 4, 2), (32, 32, 8, 1), (32, 16, 4, 1)],
    4096: [(16, 16, 4, 1), (16, 16, 8, 1)],
}
_LONG = 512  # from this number of queries on, the autotuner chooses separately
INSTALLED = importlib.util.find_spec("triton") is not None


@uncompiled  # the autotuner times launches, which torch.compile cannot trace
def triton(
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
    """As :func:`softmax_rnn.ops.forms.pairs.dense.dense`, of q and k before the feature map.

    The T x S weights are not stored. Results are deterministic for given tiles, which the autotuner
    chooses in each process. float16 and bfloat16 inputs accumulate in float32. float32 products use
    TF32 only if PyTorch's own may (``torch.backends.cuda.matmul.fp32_precision``).
    """
    inputs = first_order(q, k, v, log_decay, coefficients)
    return RowSums(*_TritonSums.apply(*inputs, mask, spec, causal))


class _TritonSums(torch.autograd.Function):
    """(q, k, v, log_decay, coefficients) -> (numerator, weight sum, row maximum or None).

    The maximum has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        coefficients: Tensor | None,
        mask: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        spec: AttentionSpec = options[0]
        q, k, v = (x.resolve_neg() for x in (q, k, v))  # kernels do not see a lazy sign
        weight_sum = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
        numerator = weight_sum.new_empty(*q.shape[:3], v.shape[3])
        maximum = torch.empty_like(weight_sum) if spec.shifted else None
        running = None if log_decay is None else running_sums(log_decay, weight_sum.dtype)
        learned = (
            None
            if coefficients is None
            else coefficients.resolve_neg().to(weight_sum.dtype).contiguous()
        )
        span = _global_span(spec, q, k, mask)
        if mask is not None:
            mask = mask.expand(*q.shape[:3], k.shape[2]).view(torch.uint8)
        inputs = (q, k, v, mask, running, learned, span)
        _launch("sums", inputs, (numerator, weight_sum, maximum), (numerator,), *options)
        ctx.save_for_backward(*inputs, maximum)
        ctx.options = options
        ctx.coefficients_dtype = None if coefficients is None else coefficients.dtype
        if maximum is not None:
            ctx.mark_non_differentiable(maximum)
        return numerator, weight_sum, maximum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor, _: None) -> tuple[Tensor | None, ...]:
        *inputs, maximum = ctx.saved_tensors
        q, k, v, _mask, _running, learned, _span = inputs
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        by_query = by_key = dlearned = None
        if ctx.needs_input_grad[3]:
            by_query, by_key = (grad_sum.new_empty(x.shape[:3]) for x in (q, k))
        if ctx.needs_input_grad[4]:
            dlearned = grad_sum.new_empty(*q.shape[:3], learned.shape[1])
        grad = grad.resolve_neg()
        given = (maximum, grad, grad_sum.resolve_neg().contiguous())
        outputs = (*given, dq, by_query, dlearned)
        _launch("query_grads", inputs, outputs, (grad, dq), *ctx.options)
        _launch("key_grads", inputs, (*given, dk, dv, by_key), (grad, dk, dv), *ctx.options)
        log_decay = coefficients = None
        if by_query is not None and by_key is not None:
            # Sums over the same weights: of products of rounded sums, less would cancel.
            by_group = by_query.double().unflatten(1, (k.shape[1], -1)).sum(2)
            log_decay = log_decay_grad(by_group, by_key.double())
        if dlearned is not None:
            coefficients = dlearned.sum((0, 2)).to(ctx.coefficients_dtype)
        return dq, dk, dv, log_decay, coefficients, None, None, None


def running_sums(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """``G`` as the kernels read it, [B, Hkv, S, 2]: rounded to ``dtype``, and what that lost."""
    total = log_decay.cumsum(2)
    rounded = total.to(dtype)
    return torch.stack([rounded, (total - rounded).to(dtype)], -1)


def _global_span(spec: AttentionSpec, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The range of keys that every query sees besides the window; int32 [B, 2].

    Other keys of the range are hidden by the mask.
    """
    if spec.hiding_window is None or not spec.global_keys:
        return None
    shown = first_visible(mask, k.shape[2], spec.global_keys, k.device).int()
    end = (shown * torch.arange(1, k.shape[2] + 1, device=k.device)).amax(-1)
    return torch.stack([shown.argmax(-1), end], -1).int().expand(len(q), 2).contiguous()


def _launch(
    name: str,
    inputs: Sequence[Any],
    others: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    spec: AttentionSpec,
    causal: bool,
) -> None:
    """Run a kernel with one program per tile and head.

    ``inputs`` are q, k, v, mask, running sums, learned coefficients and global span; ``strided``
    are those of the ``others`` that may have any strides.
    """
    q, _, v, mask = inputs[:4]
    batch, heads, queries, width = q.shape
    kv_heads, keys, value_width = v.shape[1:]
    block_d, block_e = (max(16, 1 << (size - 1).bit_length()) for size in (width, value_width))
    precision, factor_bytes = products(v.dtype)
    series = PowerSeries.known_part(spec)
    window = spec.hiding_window
    if window is not None and window >= keys:  # it hides nothing
        window = None
    strides = (None if x is None else x.stride() for x in (*inputs[:4], *strided))
    rows, count = (keys, kv_heads) if name == "key_grads" else (queries, heads)
    block = "BLOCK_S" if name == "key_grads" else "BLOCK_T"

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (-(-rows // meta[block]) * batch * count,)

    kernel, tiles = _kernel(name, max(block_d, block_e) * factor_bytes)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[grid](
            *inputs,
            *others,
            *strides,
            heads,
            heads // kv_heads,
            queries,
            keys,
            D=width,
            E=value_width,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            SCALE=spec.score_scale(width),
            CLAMP=spec.clamp,
            COEFFICIENTS=series.coefficients,
            SLOPE=series.derivative().coefficients,
            MAP=spec.feature_map,
            CAUSAL=causal,
            WINDOW=window,
            BY_QUERY=mask is not None and mask.stride(2) != 0,
            PRECISION=precision,
            LONG=queries >= _LONG,
            **tiles,
        )


def products(dtype: torch.dtype) -> tuple[str, int]:
    """The precision of products of a dtype, and the bytes of a factor, as counted in _TILES."""
    if dtype == torch.bfloat16:
        return "ieee", 2
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if tf32 or dtype == torch.float16:
        return "tf32", 4
    return "ieee", 2 * dtype.itemsize


def _kernel(name: str, row_bytes: int) -> tuple[Any, dict[str, int]]:
    """The kernel and its tile sizes: small in the interpreter, else chosen by the autotuner."""
    kernels = importlib.import_module("softmax_rnn.ops.forms.gpu.pair_kernels")
    if kernels.INTERPRETED:
        return getattr(kernels, name), {"BLOCK_T": 16, "BLOCK_S": 32}
    return _autotuned(kernels, name, min(size for size in _TILES if row_bytes <= size)), {}


@functools.cache
def _autotuned(kernels: ModuleType, name: str, row_bytes: int) -> Any:
    resident, other = ("BLOCK_S", "BLOCK_T") if name == "key_grads" else ("BLOCK_T", "BLOCK_S")
    configs = [
        kernels.triton.Config({resident: a, other: b}, num_warps=warps, num_stages=stages)
        for a, b, warps, stages in _TILES[row_bytes]
    ]
    key = ["BLOCK_D", "BLOCK_E", "MAP", "CAUSAL", "WINDOW", "PRECISION", "LONG"]
    return kernels.triton.autotune(configs, key)(getattr(kernels, name))
