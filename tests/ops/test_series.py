"""Power series: values, derivatives, the remainder, fits to exp."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmax_rnn import AttentionSpec
from softmax_rnn.ops.fitting import fit_series
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


def distance(coefficients: tuple[float, ...], scores: np.ndarray) -> np.ndarray:
    return np.polynomial.polynomial.polyval(scores, coefficients) - np.exp(scores)


@pytest.mark.parametrize(
    ("order", "radius"),
    [
        (0, 3.0),
        (1, 0.01),
        (2, 1.0),
        (5, 2.0),
        (8, 5.0),
        (9, 5.0),
        (16, 20.0),
        (30, 50.0),
        (4, 700.0),
    ],
)
def test_the_error_of_a_fit_equioscillates(order: int, radius: float) -> None:
    """By Chebyshev's theorem only the best polynomial has order + 2 such extremes."""
    coefficients = fit_series(order, radius)
    assert len(coefficients) == order + 1
    scores = radius * np.cos(np.linspace(np.pi, 0, 20_001))
    errors = distance(coefficients, scores)
    top = np.abs(errors).max()
    signs = np.sign(errors[np.abs(errors) > 0.97 * top])
    assert np.count_nonzero(np.diff(signs)) == order + 1
    if order < 16:  # in higher orders float64's rounding errors are in the fourth digit
        extremes = np.split(errors, np.flatnonzero(np.diff(np.sign(errors))) + 1)
        sizes = [np.abs(extreme).max() for extreme in extremes]
        np.testing.assert_allclose(sorted(sizes)[-order - 2 :], top, rtol=1e-4)


@pytest.mark.parametrize(("order", "radius"), [(2, 1.0), (8, 5.0), (16, 20.0)])
def test_a_fit_beats_chebyshev_and_taylor(order: int, radius: float) -> None:
    scores = np.linspace(-radius, radius, 20_001)
    best = np.abs(distance(fit_series(order, radius), scores)).max()
    near = np.polynomial.Chebyshev.interpolate(np.exp, order, domain=[-radius, radius])
    chebyshev = np.abs(near(scores) - np.exp(scores)).max()
    assert 0.3 * chebyshev < best < 0.999 * chebyshev
    assert best < remainder_bound(order, radius) / 4


def test_the_size_of_the_error() -> None:
    scores = np.linspace(-5, 5, 20_001)
    error = np.abs(distance(fit_series(8, 5.0), scores)).max() / math.exp(5)
    assert error == pytest.approx(2.76e-4, rel=1e-2)
    assert remainder_bound(8, 5.0) / math.exp(5) > 0.068


@pytest.mark.parametrize("radius", [0.01, 1.0, 5.0, 40.0])
def test_fits_of_order_0_and_1_have_closed_forms(radius: float) -> None:
    assert fit_series(0, radius) == pytest.approx([math.cosh(radius)], rel=1e-12)
    slope = math.sinh(radius) / radius  # of the chord; a parallel tangent touches at its logarithm
    touch = math.log(slope)
    constant = (math.exp(-radius) + slope * radius + slope * (1 - touch)) / 2
    assert fit_series(1, radius) == pytest.approx([constant, slope], rel=2e-5)


def test_a_fit_to_samples_is_the_weighted_least_squares_solution() -> None:
    scores = np.random.default_rng(0).normal(0.5, 1.5, (40, 5))
    flat, values = scores.ravel(), np.exp(scores.ravel())
    weights = np.random.default_rng(1).random((40, 5))
    for weight, used in ((None, 1 / (values + values.mean()) ** 2), (weights, weights.ravel())):
        coefficients = fit_series(3, samples=scores, weight=weight)
        powers = flat[:, None] ** np.arange(4)
        gradient = powers.T @ (used * distance(coefficients, flat))
        assert np.abs(gradient).max() < 1e-10 * (used * values * np.abs(flat) ** 3).sum()
    # Samples may be a tensor, and repeating one is the same as its weight.
    tensor = torch.tensor([-1.0, 0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    repeated = fit_series(1, samples=tensor, weight=torch.ones(5))
    weighted = fit_series(1, samples=[-1.0, 0.0, 1.0, 2.0], weight=[1, 2, 1, 1])
    assert repeated == pytest.approx(weighted, rel=1e-12)


def test_a_fit_to_samples_is_best_where_they_are() -> None:
    scores = np.random.default_rng(0).normal(0, 1.5, 2000)
    near = scores[np.abs(scores) < 2]
    fitted, minimax = fit_series(4, samples=scores), fit_series(4, 5.0)
    errors = [np.abs(distance(found, near)).mean() for found in (fitted, minimax)]
    assert errors[0] < 0.3 * errors[1]


def test_large_scores_overflow_nothing() -> None:
    scores = np.linspace(-700, 700, 101)
    for coefficients in (fit_series(4, 700.0), fit_series(4, samples=scores)):
        assert all(map(math.isfinite, coefficients))
        assert math.isfinite(np.abs(distance(coefficients, scores)).max())


def test_a_fit_is_a_series() -> None:
    spec = AttentionSpec(series="polynomial", coefficients=fit_series(8, 3.0))
    torch.testing.assert_close(PowerSeries.from_spec(spec)(X), X.exp(), rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": -1, "radius": 1.0}, "order must be an integer >= 0, not -1"),
        ({"order": 2}, "either a radius or samples"),
        ({"order": 2, "radius": 1.0, "samples": [0.0]}, "either a radius or samples"),
        ({"order": 2, "radius": 0.0}, r"radius must be in \(0, 700\], not 0.0"),
        ({"order": 2, "radius": math.nan}, r"radius must be in \(0, 700\], not nan"),
        ({"order": 2, "radius": 1.0, "weight": [1.0]}, "weight applies only to samples"),
        ({"order": 2, "samples": [0.0, 1.0, 2.0]}, "at least 4 different samples .* not 3"),
        ({"order": 0, "samples": [0.0, math.inf]}, r"samples must be in \[-700, 700\]"),
        (
            {"order": 0, "samples": [0.0, 1.0], "weight": [1.0]},
            r"shape of samples, \[2\], not \[1\]",
        ),
        ({"order": 0, "samples": [0.0, 1.0], "weight": [1.0, -1.0]}, "weight must be finite and"),
        ({"order": 0, "samples": [0.0, 1.0], "weight": [1.0, 0.0]}, "at least 2 different"),
        ({"order": 8, "radius": 0.1}, "order 8 is too high for float64 on .* Use a lower order"),
        ({"order": 40, "radius": 50.0}, "order 40 is too high for float64"),
        ({"order": 300, "radius": 5.0}, "order 300 is too high for float64"),
        ({"order": 60, "samples": [n / 50 for n in range(-99, 99)]}, "order 60 is too high"),
    ],
)
def test_a_fit_that_is_not_possible(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_series(**arguments)


def test_learned_coefficients_are_needed() -> None:
    """Not exp in their place."""
    spec = AttentionSpec(series="polynomial", order=2)
    with pytest.raises(AssertionError, match="Learned coefficients"):
        PowerSeries.from_spec(spec)
    assert PowerSeries.known_part(spec).coefficients == (1.0, 1.0, 1.0)
