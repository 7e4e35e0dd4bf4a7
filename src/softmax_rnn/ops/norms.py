"""Vector norms over the head dimension, in place of a denominator (equation 6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import no_data
from softmax_rnn.ops.spec import Norm

# The authors use the defaults of nn.LayerNorm and nn.RMSNorm (the machine epsilon of float32). The
# L2 norm leaves a zero vector unchanged.
NORM_EPS: dict[Norm, float] = {"layer": 1e-5, "rms": torch.finfo(torch.float32).eps}


def normalized(
    x: Tensor, log_scale: Tensor | None, norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The norm of ``x * exp(log_scale)`` over the last dimension, times ``weight``, plus ``bias``.

    ``log_scale`` [...] has no gradient. Raises ``OverflowError`` for the norm ``none`` if the true
    scale of a vector exceeds the range of its dtype.
    """
    if norm == "l2":
        return unit(x)
    if norm == "none":
        return x if log_scale is None else x * _exp_or_raise(log_scale).unsqueeze(-1)
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    largest = x.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    x = x / largest  # squares of large numbers overflow
    eps = NORM_EPS[norm] / largest.square()
    if log_scale is not None:
        # The scale affects a norm only through the epsilon, which is divided by the squared scale.
        eps = eps * (-2 * log_scale).exp().unsqueeze(-1)
        eps = eps.clamp(min=torch.finfo(eps.dtype).tiny)  # a row of zeros stays zero
    # Not a product with rsqrt, whose derivative is its cube and overflows beside a row of zeros.
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """``x / |x|`` over the last dimension, at any scale; zero vectors stay zero.

    It has no derivative at a zero vector. The gradient that it passes on there is its own, in units
    of the sums at hand.
    """
    found = _unit(x) if torch.compiler.is_compiling() else _Unit.apply(x)
    direction: Tensor = found[0]
    return direction


def _unit(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The unit vectors, the lengths of ``x / largest`` [..., 1], and ``largest`` [..., 1].

    ``largest`` is the largest absolute entry of each vector.
    """
    largest = x.detach().abs().amax(-1, keepdim=True)  # squares of small numbers would underflow
    largest = largest.masked_fill(largest == 0, 1.0)
    x = x / largest
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    length = length.clamp(min=1)  # below 1 only for a zero vector
    return x / length, length, largest


class _Unit(torch.autograd.Function):
    """:func:`_unit` with half the memory passes of autograd's backward; not used when compiled.

    It saves only the input and internal outputs, so that its gradient is differentiable and the
    result may be changed in place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _unit(x)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        _, length, largest = output
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(*inputs, length, largest)
        ctx.save_for_forward(*inputs, length, largest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_length: Tensor, _: None) -> Tensor:
        # Accessed once: activation checkpointing allows no second access.
        x, length, largest = ctx.saved_tensors
        return _perpendicular(x, length, largest, grad, -grad_length * length)[0]

    @staticmethod
    def jvp(ctx: Any, change: Tensor) -> tuple[Tensor, Tensor, None]:
        x, length, largest = ctx.saved_tensors
        moved, along = _perpendicular(x, length, largest, change, 0.0)
        return moved, along / largest, None


def _perpendicular(
    x: Tensor, length: Tensor, largest: Tensor, change: Tensor, more: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Split ``change``: its part perpendicular to ``x``, over the length; its parallel part."""
    total = length * largest
    direction = x / total
    along = (change * direction).sum(-1, keepdim=True) + more
    return torch.addcmul(change, direction, along, value=-1).div_(total), along


def _exp_or_raise(log_scale: Tensor) -> Tensor:
    scale = log_scale.exp()
    if not no_data(scale) and not scale.isfinite().all():
        limit = torch.finfo(scale.dtype).max
        raise OverflowError(
            f"The un-normalised sum of weights overflows {scale.dtype}: the largest "
            f"log-sum-exp is {log_scale.max().item():.1f}, the largest number {limit:.3g}. "
            "Give the spec a norm, a row-sum denominator, or a clamp (the paper's is 5)."
        )
    return scale
