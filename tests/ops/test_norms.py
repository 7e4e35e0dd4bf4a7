"""Unit vectors: at any scale, with derivatives of any kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops.norms import unit


def plain(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def vectors(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)


def test_derivatives_forward_backward_and_second() -> None:
    x = vectors(2, 3, 5)
    checks = {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(unit, x, **checks, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(unit, x)
    hessians = [
        torch.func.hessian(lambda y, f=f: (f(y) ** 3).sum())(x.detach()[0, 0])
        for f in (unit, plain)
    ]
    torch.testing.assert_close(*hessians)


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1.0, 1e150, 1e300])
def test_the_scale_does_not_matter(scale: float) -> None:
    x, upstream = vectors(7, 6), vectors(7, 6)
    scaled = (x.detach() * scale).requires_grad_()
    torch.testing.assert_close(unit(scaled), plain(x))
    (found,) = torch.autograd.grad(unit(scaled), scaled, upstream)
    (expected,) = torch.autograd.grad(plain(x), x, upstream)
    torch.testing.assert_close(found * scale, expected)


@pytest.mark.parametrize("largest", [1e-30, 1e30, 3e38])
def test_a_length_may_be_beyond_the_largest_number(largest: float) -> None:
    x = torch.full((2, 64), largest).requires_grad_()
    torch.testing.assert_close(unit(x), torch.full((2, 64), 1 / 8))
    (grad,) = torch.autograd.grad(unit(x), x, torch.randn(2, 64))
    assert grad.isfinite().all()


def test_the_result_may_be_changed_in_place() -> None:
    x, upstream = vectors(3, 8), vectors(3, 8)
    changed = unit(x)
    changed += 1
    (found,) = torch.autograd.grad(changed, x, upstream)
    (expected,) = torch.autograd.grad(unit(x), x, upstream)
    assert torch.equal(found, expected)


def test_a_zero_vector_stays_and_hands_its_gradient_on() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    upstream = torch.arange(8.0).view(2, 4)
    (grad,) = torch.autograd.grad(unit(x), x, upstream)
    assert torch.equal(unit(x), x)
    assert torch.equal(grad, upstream)


def test_compiled_it_is_one_graph_and_the_same() -> None:
    x, upstream = vectors(3, 8), vectors(3, 8)
    compiled = torch.compile(unit, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), unit(x))
    found, expected = (torch.autograd.grad(f(x), x, upstream) for f in (compiled, unit))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_row_of_zeros_beside_large_scores_has_gradients(norm: str) -> None:
    """The epsilon, in units of the row's largest weight, is then the smallest number there is."""
    spec = sr.AttentionSpec(denominator="length", norm=norm)
    for dtype, size in ((torch.float32, 5.0), (torch.float64, 17.0)):
        x = torch.full((1, 1, 3, 4), size, dtype=dtype)
        v = torch.zeros(1, 1, 3, 4, dtype=dtype, requires_grad=True)
        for form in sr.forms(spec):
            out = sr.attention(x, x, v, spec, form=form)
            (grad,) = torch.autograd.grad(out[..., 0].sum(), v)
            assert not out.any(), form
            assert grad.isfinite().all(), form
