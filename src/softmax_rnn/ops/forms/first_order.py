"""An error for derivatives that a hand-written backward pass does not support."""

from __future__ import annotations

from typing import Any, TypeVarTuple, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

Tensors = TypeVarTuple("Tensors")

_ADVICE = "this form supports only first derivatives in reverse mode; form='dense' supports all."


def first_order(*inputs: *Tensors) -> tuple[*Tensors]:
    """Return the tensors unchanged, but allow only first derivatives in reverse mode.

    Otherwise PyTorch silently drops second derivatives if the gradient of an output is a constant
    (``torch.autograd.grad(out.sum(), q, create_graph=True)``), and drops the tangents of a custom
    operator. A compiled model raises its own error.

    The inputs are the tensors that a form saves for its backward pass, so this needs no additional
    memory. ``NotImplementedError`` is raised when an unsupported derivative is computed.
    """
    given = [x for x in inputs if isinstance(x, Tensor)]
    if torch.compiler.is_compiling() or not any(map(differentiated, given)):
        return inputs
    marked = iter(_FirstOrder.apply(*given))
    return cast(tuple[*Tensors], tuple(x if x is None else next(marked) for x in inputs))


def differentiated(x: Tensor) -> bool:
    """Whether ``x`` needs a derivative, in reverse or forward mode."""
    backward = x.requires_grad and torch.is_grad_enabled()
    return backward or unpack_dual(x).tangent is not None


def traced() -> bool:
    """Whether operations are recorded, by whichever tracer: what they do is then all that counts.

    Others than ``torch.compile`` are ``torch.jit.trace`` and modes such as that of ``make_fx``.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def unreadable() -> bool:
    """Whether tensors may have no numbers here: they are traced or transformed."""
    return traced() or transformed()


def transformed() -> bool:
    """Whether this runs inside a ``torch.func`` transform, whose tensors have no address."""
    return torch._C._functorch.maybe_current_level() is not None


def wrapped(x: Tensor) -> bool:
    """Whether ``x`` is such a tensor; others are constants of the transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


class _FirstOrder(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():  # no graph of the gradients is needed
            return grads
        saved = ctx.saved_tensors
        return cast(tuple[Tensor, ...], _NotTwice.apply(*grads, *saved)[: len(grads)])

    @staticmethod
    def jvp(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(f"Forward-mode derivative: {_ADVICE}")


class _NotTwice(_FirstOrder):
    """Return gradients and saved inputs unchanged; differentiating them raises an error."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"Second derivative: {_ADVICE}")
