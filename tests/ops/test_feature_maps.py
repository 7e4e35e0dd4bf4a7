"""The feature maps, at any size and in any type."""

from __future__ import annotations

import pytest
import torch

import softmax_rnn as sr
from softmax_rnn.ops.feature_maps import FEATURE_MAPS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_elu1_keeps_its_digits_below_zero(dtype: torch.dtype) -> None:
    """elu(x) + 1 cancels there: zero from -17 on in float32."""
    x = torch.linspace(-80, 20, 999).to(dtype)
    found = FEATURE_MAPS["elu1"](x)
    expected = torch.where(x > 0, x.double() + 1, x.double().exp())
    assert ((found - expected).abs() / expected).max() < 1e-6


def test_elu1_has_every_derivative() -> None:
    x = torch.randn(4, 5, dtype=torch.float64).mul(3).requires_grad_()
    phi = FEATURE_MAPS["elu1"]
    assert torch.autograd.gradcheck(phi, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(phi, x)
    ends = torch.tensor([0.0, -0.0, 1e4, -1e4, 3e38, -3e38], requires_grad=True)
    (slope,) = torch.autograd.grad(phi(ends).sum(), ends)
    assert slope.tolist() == [1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", sr.forms("linear_elu"))
def test_linear_elu_of_negative_queries_and_keys(form: str, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 60, 8, dtype=torch.float64).to(dtype).unbind(0)
    q, k = q - 14, k - 14
    expected = sr.attention(q.double(), k.double(), v.double(), "linear_elu", form="dense")
    found = sr.attention(q, k, v, "linear_elu", form=form)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert float((found - expected).norm() / expected.norm()) < tolerance
