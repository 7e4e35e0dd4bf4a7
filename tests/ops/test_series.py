"""Power series: values, derivatives, the remainder."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmax_rnn import AttentionSpec
from softmax_rnn.ops.series import PowerSeries, order_for, remainder_bound

X = torch.linspace(-3, 3, 41, dtype=torch.float64)


@pytest.mark.parametrize("order", range(12))
def test_taylor(order: int) -> None:
    series = PowerSeries.from_spec(AttentionSpec(series="taylor", order=order))
    expected = sum(X**n / math.factorial(n) for n in range(order + 1))
    torch.testing.assert_close(series(X), expected)
    if order:
        lower = PowerSeries.from_spec(AttentionSpec(series="taylor", order=order - 1))
        torch.testing.assert_close(series.derivative()(X), lower(X))


@pytest.mark.parametrize("order", range(6))
def test_power(order: int) -> None:
    series = PowerSeries.from_spec(AttentionSpec(series="power", order=order))
    torch.testing.assert_close(series(X), X**order)


@pytest.mark.parametrize(
    "spec", [AttentionSpec(), *(AttentionSpec(series="power", order=n) for n in range(4))]
)
def test_derivative_is_autograd(spec: AttentionSpec) -> None:
    series = PowerSeries.from_spec(spec)
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


@pytest.mark.parametrize(
    ("order", "radius"), [(-1, 1.0), (1.5, 1.0), (2, -1.0), (2, math.nan), (10, 1000.0)]
)
def test_bad_arguments(order: int, radius: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        remainder_bound(order, radius)


@pytest.mark.parametrize("tolerance", [0.1, 1e-3, 1e-9])
@pytest.mark.parametrize("radius", [0.0, 0.5, 2.0, 9.0, 40.0, 700.0])
def test_order_for_is_the_lowest_that_suffices(tolerance: float, radius: float) -> None:
    order = order_for(tolerance, radius)
    assert remainder_bound(order, radius) <= tolerance
    assert order == 0 or remainder_bound(order - 1, radius) > tolerance


def test_order_for_mistakes() -> None:
    with pytest.raises(ValueError, match=r"tolerance must be > 0, not 0.0"):
        order_for(0.0, 1.0)
    with pytest.raises(ValueError, match=r"radius must be in \[0, 700\], not 701"):
        order_for(0.1, 701)


def test_any_order_has_coefficients() -> None:
    coefficients = PowerSeries.from_spec(AttentionSpec(series="taylor", order=200)).coefficients
    assert coefficients[170] > 0
    assert coefficients[200] == 0.0  # below the range of float64
