"""Derivatives that a hand-written backward pass does not have: an error in place of wrong ones."""

from __future__ import annotations

from typing import Any, TypeVarTuple, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

Tensors = TypeVarTuple("Tensors")

_ADVICE = "the form in use has first derivatives in reverse mode alone; form='dense' has all."


def first_order(*inputs: *Tensors) -> tuple[*Tensors]:
    """The tensors as they are, of which only first derivatives in reverse mode can be taken.

    PyTorch drops a second derivative without a word where the gradient of an output is a constant
    (``torch.autograd.grad(out.sum(), q, create_graph=True)``), and the tangents of an operator of
    our own. A compiled model says so itself.

    Args:
        inputs: what a form saves for its backward pass, so that this keeps no memory of its own;
            ``None`` stays.

    Raises:
        NotImplementedError: from the derivative that is not there, naming the form that has it.
    """
    given = [x for x in inputs if isinstance(x, Tensor)]
    if torch.compiler.is_compiling() or not any(map(differentiated, given)):
        return inputs
    marked = iter(_FirstOrder.apply(*given))
    return cast(
        tuple[*Tensors], tuple(next(marked) if isinstance(x, Tensor) else x for x in inputs)
    )


def differentiated(x: Tensor) -> bool:
    """Whether a derivative by ``x`` may be asked for, in reverse or forward mode."""
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
        if not torch.is_grad_enabled():  # no graph of the gradients was asked for
            return grads
        saved = ctx.saved_tensors
        return cast(tuple[Tensor, ...], _NotTwice.apply(*grads, *saved)[: len(grads)])

    @staticmethod
    def jvp(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(f"Forward-mode derivative: {_ADVICE}")


class _NotTwice(torch.autograd.Function):
    """Gradients, and what they depend on, as they are: an error where they are differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"Second derivative: {_ADVICE}")
