"""Polynomials near exp: the best one on an interval, or on a sample of scores.

The Taylor polynomial is best at 0 alone. On ``[-5, 5]``, at order 8, the best polynomial has an
error that is 250 times smaller. Both fits work in Chebyshev polynomials of the score, in units of
the largest weight; only the result is written in powers of the score.
"""

from __future__ import annotations

import math
import operator
from itertools import accumulate, repeat

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial, chebyshev, polynomial
from numpy.typing import ArrayLike, NDArray

from softmax_rnn.ops.series import MAX_RADIUS, require_order

Array = NDArray[np.float64]

_POINTS = 64  # of the grid, per extreme of the error
_EXCHANGES = 100  # far more than are needed: they converge quadratically
_EQUAL = 1e-6  # relative difference of extremes that count as equal
_ROUNDING = 0.1  # largest rounding error of a polynomial, as a share of its distance from exp


def fit_series(
    order: int,
    radius: float | None = None,
    *,
    samples: ArrayLike | None = None,
    weight: ArrayLike | None = None,
) -> tuple[float, ...]:
    """Coefficients of a polynomial near exp, for ``AttentionSpec(series="polynomial")``.

    With ``radius``, the polynomial minimises the largest absolute error ``|p(x) - exp(x)|`` over
    ``|x| <= radius`` (Remez exchange). With ``samples``, it minimises the sum over the samples of
    ``weight * (p(x) - exp(x))^2``. By default ``weight = 1 / (exp(x) + m)^2`` with ``m`` the mean
    of ``exp`` over the samples: large weights count by their relative error, small ones by their
    error relative to the mean weight.

    Neither polynomial is meant for scores beyond the radius or the samples. It may be negative,
    also inside (``AttentionSpec.sign_definite`` tells), so that a row sum may cross zero.

    Args:
        order: highest power, an integer >= 0.
        radius: largest absolute score, in (0, 700].
        samples: scores of any shape, all in [-700, 700], at least ``order + 2`` different ones.
        weight: one number >= 0 per sample, in the shape of the samples.

    Returns:
        ``order + 1`` coefficients, from the constant term on.

    Raises:
        ValueError: for invalid arguments, and for an order that is too high for float64: written in
            powers of the score, the polynomial would have a rounding error of more than a tenth of
            its distance from exp.

    Example:
        >>> spec = AttentionSpec(series="polynomial", coefficients=fit_series(8, 5.0))
    """
    require_order(order)
    if (radius is None) == (samples is None):
        raise ValueError("fit_series needs either a radius or samples.")
    if samples is not None:
        return _least_squares(order, *_checked_samples(order, samples, weight))
    if weight is not None:
        raise ValueError("weight applies only to samples.")
    assert radius is not None
    if isinstance(radius, bool) or not 0 < radius <= MAX_RADIUS:
        raise ValueError(f"radius must be in (0, {MAX_RADIUS:g}], not {radius!r}.")
    return _minimax(order, float(radius))


def _minimax(order: int, radius: float) -> tuple[float, ...]:
    """The Remez exchange for ``exp(radius * (t - 1))`` on ``|t| <= 1``, with ``t = cos(angle)``.

    The best polynomial's error has ``order + 2`` extremes of equal size and alternating sign. Each
    step solves for a polynomial with errors of equal size at some points, and then moves the points
    to the extremes of its error.
    """
    where = f"[-{radius:g}, {radius:g}]"
    grid = np.linspace(0.0, math.pi, _POINTS * (order + 2) + 1)
    angles = np.linspace(0.0, math.pi, order + 2)  # a good start: the extremes of Chebyshev's
    signs = (-1.0) ** np.arange(order + 2)
    for _ in range(_EXCHANGES):
        t = np.cos(angles)
        system = np.column_stack((chebyshev.chebvander(t, order), signs))
        *coefficients, level = np.linalg.solve(system, np.exp(radius * (t - 1)))
        fitted = Chebyshev(coefficients)
        powers = _in_powers(fitted, np.ones(1), abs(level), order, where)
        angles = _extremes(fitted, radius, grid, order + 2)
        if np.abs(_distance(fitted, radius, angles)).max() <= abs(level) * (1 + _EQUAL):
            break
    return _unscaled(powers, radius, radius)


def _distance(fitted: Chebyshev, radius: float, angles: Array) -> Array:
    t = np.cos(angles)
    return fitted(t) - np.exp(radius * (t - 1))


def _extremes(fitted: Chebyshev, radius: float, grid: Array, count: int) -> Array:
    """The angles of ``count`` extremes of alternating sign, the largest distance among them."""
    values = _distance(fitted, radius, grid)
    runs = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(values))) + 1)
    at = np.array([run[np.abs(values[run]).argmax()] for run in runs])
    while len(at) > count:  # the signs of the rest alternate only if an end is dropped
        at = at[1:] if abs(values[at[0]]) < abs(values[at[-1]]) else at[:-1]
    inner = at[(at > 0) & (at < len(grid) - 1)]
    # The top of the parabola through a grid point and its two neighbours.
    before, here, after = (values[inner + step] for step in (-1, 0, 1))
    bend = before - 2 * here + after
    steps = 0.5 * (before - after) / np.where(bend == 0, np.inf, bend)
    angles = grid[at]
    angles[np.isin(at, inner)] += np.clip(steps, -1, 1) * grid[1]
    return angles


def _least_squares(order: int, scores: Array, weight: Array | None) -> tuple[float, ...]:
    radius, top = float(np.abs(scores).max()), float(scores.max())
    values = np.exp(scores - top)
    weight = 1 / (values + values.mean()) ** 2 if weight is None else weight
    t = scores / (radius or 1.0)
    fitted = Chebyshev.fit(t, values, order, w=np.sqrt(weight))
    error = math.sqrt(np.average((fitted(t) - values) ** 2, weights=weight))
    powers = _in_powers(fitted, t, error, order, "these samples", weight)
    return _unscaled(powers, radius, top)


def _in_powers(
    fitted: Chebyshev, t: Array, error: float, order: int, where: str, weight: Array | None = None
) -> Array:
    """The coefficients of the powers of ``t``; ``ValueError`` if rounding spoils them."""
    powers: Array = fitted.convert(kind=Polynomial, domain=[-1, 1]).coef.astype(np.float64)
    terms = polynomial.polyval(np.abs(t), np.abs(powers))
    rounding = np.finfo(np.float64).eps * math.sqrt(np.average(terms**2, weights=weight))
    if not rounding <= _ROUNDING * error:
        raise ValueError(
            f"order {order} is too high for float64 on {where}: relative to the largest weight, "
            f"the polynomial is within {error:.1g} of exp, but its terms have a rounding error of "
            f"{rounding:.1g}. Use a lower order."
        )
    return powers


def _unscaled(powers: Array, radius: float, top: float) -> tuple[float, ...]:
    """The coefficients of the powers of the score, in units of 1 instead of ``exp(top)``."""
    units = accumulate(repeat(radius, len(powers) - 1), operator.truediv, initial=math.exp(top))
    return tuple(float(a) * unit for a, unit in zip(powers, units, strict=True))


def _checked_samples(
    order: int, samples: ArrayLike, weight: ArrayLike | None
) -> tuple[Array, Array | None]:
    scores = np.asarray(samples, dtype=np.float64)
    factors = None if weight is None else np.asarray(weight, dtype=np.float64)
    if not (np.abs(scores) <= MAX_RADIUS).all():
        raise ValueError(f"samples must be in [-{MAX_RADIUS:g}, {MAX_RADIUS:g}].")
    if factors is not None and factors.shape != scores.shape:
        raise ValueError(
            f"weight must have the shape of samples, {list(scores.shape)}, not "
            f"{list(factors.shape)}."
        )
    if factors is not None and not ((factors >= 0) & np.isfinite(factors)).all():
        raise ValueError("weight must be finite and >= 0.")
    different = len(np.unique(scores if factors is None else scores[factors > 0]))
    if different < order + 2:
        raise ValueError(
            f"order {order} needs at least {order + 2} different samples with a weight > 0, not "
            f"{different}."
        )
    return scores.ravel(), None if factors is None else factors.ravel()
