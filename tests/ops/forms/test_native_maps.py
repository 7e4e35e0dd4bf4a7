"""Feature maps in C++: the values and gradients of PyTorch's, in any layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops.feature_maps import FEATURE_MAPS, elu1, elu1_gradient
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.cpu import maps as native_maps

pytestmark = pytest.mark.skipif(
    bool(cpp.missing()), reason="needs g++ and SOFTMAX_RNN_CPU_KERNEL other than 0"
)


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal numbers and some far from zero."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=draw, dtype=torch.float64)
    x.flatten()[:6] = torch.tensor([0.0, -0.0, 1e4, -1e4, -80.0, 1e-8])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "strided", "part", "expanded"])
@pytest.mark.parametrize("shape", [(2, 3, 256, 5), (1, 1, 5001, 7), (1, 2, 40_000, 1)])
def test_values_and_gradients(
    dtype: torch.dtype, layout: str, shape: tuple[int, int, int, int]
) -> None:
    """Sizes that no vector and no task divides."""
    x = numbers(dtype, *shape)
    if layout == "tokens first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    elif layout == "part":
        x = torch.cat([x, x], -1)[..., : shape[-1]]
    elif layout == "expanded":
        x = x[:, :1].expand(shape)
    assert native_maps.takes(x) == (layout != "strided" or shape[-1] == 1)
    expected = torch.where(x > 0, x.double() + 1, x.double().exp())
    tolerance = 1e-14 if dtype == torch.float64 else 4e-7
    mapped = elu1(x)
    assert mapped.dtype == dtype
    torch.testing.assert_close(mapped.double(), expected, rtol=tolerance, atol=1e-37)
    grad = numbers(dtype, *shape).flip(2)
    slope = expected.clamp(max=1) * grad.double()
    for given in (grad, torch.empty_like(x).copy_(grad)):  # from another layout, and from this one
        for of in (mapped, torch.empty_like(x).copy_(mapped)):
            found = elu1_gradient(of, given)
            torch.testing.assert_close(found.double(), slope, rtol=2 * tolerance, atol=1e-37)


def test_nan_stays_nan() -> None:
    x = numbers(torch.float32, 1, 1, 300, 3)
    x[0, 0, 7, 1] = torch.nan
    assert native_maps.takes(x)
    assert elu1(x).isnan().nonzero().tolist() == [[0, 0, 7, 1]]


def test_what_is_differentiated_keeps_its_graph() -> None:
    """Second derivatives, which the dense form supports."""
    x = numbers(torch.float64, 1, 1, 256, 2).requires_grad_()
    (first,) = torch.autograd.grad(FEATURE_MAPS["elu1"](x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    expected = torch.where(x > 0, 0.0, x.exp())
    expected[x == 0] = second[x == 0]  # where the slope has a corner
    torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_native_form_maps_by_itself(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 300, 6, generator=draw, dtype=torch.float64) for _ in range(3)]
    results = []
    for kind, form in ((dtype, "native"), (torch.float64, "dense")):
        q, k, v = (x.to(kind).requires_grad_() for x in given)
        out = sr.attention(q, k, v, "linear_elu", form=form)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for a, b in zip(*results, strict=True):
        assert (a.double() - b).norm() <= (1e-11 if dtype == torch.float64 else 1e-5) * b.norm()
