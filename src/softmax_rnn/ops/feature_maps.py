"""The feature maps ``phi`` (``formula.feature``) of queries or keys [..., D].

``elu1`` and ``cosine`` return the dtype of sums, since exp(-10) has few digits in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.forms.cpu import maps as native_maps
from softmax_rnn.ops.forms.first_order import differentiated
from softmax_rnn.ops.forms.row_sums import compute_dtype


def _elu1(x: Tensor) -> Tensor:
    x = x.to(compute_dtype(x.dtype))
    if torch.compiler.is_compiling() or not differentiated(x):
        return elu1(x)
    mapped: Tensor = _Elu1.apply(x)
    return mapped


def elu1(x: Tensor) -> Tensor:
    """``x + 1`` above zero, else ``exp(x)``: always the larger one.

    ``elu(x) + 1`` would lose digits below zero.
    """
    if native_maps.takes(x):
        return native_maps.elu1(x)
    return torch.maximum(x + 1, x.clamp(max=0).exp())


def elu1_gradient(mapped: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of ``mapped = elu1(x)``: ``elu1' = min(elu1, 1)``."""
    if native_maps.takes(mapped, grad):
        return native_maps.elu1_gradient(mapped, grad)
    return grad * mapped.clamp(max=1)


class _Elu1(torch.autograd.Function):
    """:func:`elu1` with half the memory passes of autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return elu1(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mapped,) = ctx.saved_tensors
        return elu1_gradient(mapped, grad)

    jvp = backward


def _cosine(x: Tensor) -> Tensor:
    # float16 holds neither the smallest divisor of normalize nor a large length.
    return F.normalize(x.to(compute_dtype(x.dtype)), dim=-1)


# The Triton kernels have their own implementations of these maps.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu1": _elu1,
    "relu": F.relu,
    "cosine": _cosine,
}
