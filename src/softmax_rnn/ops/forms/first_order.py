"""An error for derivatives that a hand-written backward pass does not have."""

from __future__ import annotations

from typing import Any, TypeVarTuple, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

Tensors = TypeVarTuple("Tensors")

_ADVICE = "the form in use has only first derivatives in reverse mode; form='dense' has all."


def first_order(*inputs: *Tensors) -> tuple[*Tensors]:
    """The tensors unchanged, but a derivative other than the first in reverse mode is an error.

    PyTorch silently drops a second derivative where the gradient of an output is a constant
    (``torch.autograd.grad(out.sum(), q, create_graph=True)``), and the tangents of a custom
    operator. A compiled model raises an error of its own.

    The inputs are what a form saves for its backward pass, so that this needs no further memory.
    ``NotImplementedError`` is raised when the missing derivative is taken.
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
    """Gradients and what they depend on, unchanged; differentiating them is an error."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"Second derivative: {_ADVICE}")
