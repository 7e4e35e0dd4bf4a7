"""Power series: values, derivatives, the remainder."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmax_rnn import AttentionSpec, remainder_bound
from softmax_rnn.series import PowerSeries

X = torch.linspace(-3, 3, 41, dtype=torch.float64)


@pytest.mark.parametrize("order", range(12))
def test_taylor(order: int) -> None:
    series = PowerSeries.of(AttentionSpec(series="taylor", order=order))
    expected = sum(X**n / math.factorial(n) for n in range(order + 1))
    torch.testing.assert_close(series(X), expected)
    if order:
        lower = PowerSeries.of(AttentionSpec(series="taylor", order=order - 1))
        torch.testing.assert_close(series.derivative()(X), lower(X))


@pytest.mark.parametrize("order", range(6))
def test_power(order: int) -> None:
    series = PowerSeries.of(AttentionSpec(series="power", order=order))
    torch.testing.assert_close(series(X), X**order)


@pytest.mark.parametrize(
    "spec", [AttentionSpec(), *(AttentionSpec(series="power", order=n) for n in range(4))]
)
def test_derivative_is_autograd(spec: AttentionSpec) -> None:
    series = PowerSeries.of(spec)
    x = X.clone().requires_grad_()
    out = series(x)
    grad = torch.autograd.grad(out.sum(), x)[0] if out.requires_grad else torch.zeros_like(X)
    torch.testing.assert_close(series.derivative()(X), grad)


@given(order=st.integers(0, 30), radius=st.floats(0, 20), share=st.floats(-1, 1))
def test_remainder_bound_bounds(order: int, radius: float, share: float) -> None:
    x = radius * share
    taylor = math.fsum(x**n / math.factorial(n) for n in range(order + 1))
    slack = 1e-12 * math.exp(radius)
    assert abs(math.exp(x) - taylor) <= remainder_bound(order, radius) * (1 + 1e-9) + slack


@pytest.mark.parametrize(("order", "radius"), [(0, 1.0), (2, 2.0), (5, 5.0), (10, 3.0)])
def test_remainder_bound_is_attained(order: int, radius: float) -> None:
    tail = math.fsum(radius**n / math.factorial(n) for n in range(order + 1, 100))
    assert remainder_bound(order, radius) == pytest.approx(tail, rel=1e-12)


@pytest.mark.parametrize(("order", "radius"), [(-1, 1.0), (1.5, 1.0), (2, -1.0), (2, math.nan)])
def test_bad_arguments(order: int, radius: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        remainder_bound(order, radius)
