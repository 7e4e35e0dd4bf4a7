"""Power series ``w(x) = sum_n a_n x^n``: the weight of every attention, apart from decays.

The exponential, its Taylor polynomials, single powers and other polynomials share one class. The
derivative of a series is again a series (for ``taylor`` N it is ``taylor`` N-1), so the forms need
no other function for their backward pass.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, chain, count, islice, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.forms.first_order import differentiated, transformed
from softmax_rnn.ops.spec import AttentionSpec

MAX_RADIUS = 700.0  # a little more overflows float64


class PowerSeries(NamedTuple):
    """``w(x) = sum_n coefficients[n] * x**n``; ``coefficients`` is ``None`` for exp itself.

    A coefficient is a number, or a tensor that broadcasts to ``x``.
    """

    coefficients: tuple[float | Tensor, ...] | None

    @classmethod
    def from_spec(cls, spec: AttentionSpec, coefficients: Tensor | None = None) -> PowerSeries:
        """The weight series of a spec.

        Learned ``coefficients`` are [..., N + 1], where the dimensions before the last one
        broadcast to the scores.
        """
        if coefficients is not None:
            return cls(coefficients.unbind(-1))
        assert not spec.learned_coefficients, "Learned coefficients are an argument."
        if spec.series == "exp":
            return cls(None)
        if spec.series == "polynomial":
            return cls(spec.coefficients)
        assert spec.order is not None
        if spec.series == "power":
            return cls((0.0,) * spec.order + (1.0,))
        assert spec.series == "taylor"
        return cls(tuple(1 / math.factorial(n) for n in range(spec.order + 1)))

    @classmethod
    def known_part(cls, spec: AttentionSpec) -> PowerSeries:
        """The weight series of a spec, where learned coefficients, factors of it, count as 1."""
        if spec.learned_coefficients:
            return cls((1.0,) * (1 + (spec.order or 0)))
        return cls.from_spec(spec)

    def __call__(self, x: Tensor) -> Tensor:
        """``w(x)``, element by element (Horner's rule for a finite series)."""
        if self.coefficients is None:
            return x.exp()
        *lower, leading = self.coefficients
        if not lower:
            return torch.zeros_like(x) + leading
        result = leading * x
        if isinstance(lower[-1], Tensor) or lower[-1]:
            result = result + lower[-1] if differentiated(result) else result.add_(lower[-1])
        # In place unless a derivative needs the intermediate results.
        reuse = None if differentiated(result) or transformed() else result
        for coefficient in reversed(lower[:-1]):
            if not isinstance(coefficient, Tensor):
                coefficient = x.new_tensor(coefficient)
            # One fused pass: coefficient + result * x.
            result = torch.addcmul(coefficient, result, x, out=reuse)
        return result

    def derivative(self) -> PowerSeries:
        """``w'`` as a series."""
        if self.coefficients is None:
            return self
        return PowerSeries(tuple(n * a for n, a in enumerate(self.coefficients))[1:] or (0.0,))


def remainder_bound(order: int, radius: float) -> float:
    """``max |exp(x) - taylor_order(x)|`` over ``|x| <= radius``: exact, attained at ``radius``.

    It is the tail ``sum_{n > order} radius^n / n!`` of exp's series.

    Raises:
        ValueError: for an order that is not an integer >= 0, or a radius that is not in [0, 700]
            (beyond 700, exp itself overflows).
    """
    require_order(order)
    _check_radius(radius)
    factors = (radius / n for n in count(1))
    terms = accumulate(factors, operator.mul, initial=1.0)
    head = math.fsum(islice(terms, order + 1))
    if order + 1 < radius:  # the tail is more than half of exp: little cancels
        return math.exp(radius) - head
    first = next(terms)
    tail: Iterator[float] = takewhile(lambda term: term > 1e-17 * first, terms)
    return math.fsum(chain([first], tail))


def order_for(tolerance: float, radius: float) -> int:
    """The lowest order whose Taylor series is within ``tolerance`` of exp on ``|x| <= radius``.

    Raises:
        ValueError: for a tolerance that is not > 0, or a radius that is not in [0, 700].
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be > 0, not {tolerance!r}.")
    _check_radius(radius)
    # Past e * radius every further order more than halves the remainder.
    orders = range(int(math.e * radius) + int(math.log2(1 / min(tolerance, 0.5))) + 2)
    return bisect_left(orders, True, key=lambda order: remainder_bound(order, radius) <= tolerance)


def require_order(order: int) -> None:
    """Raise ``ValueError`` unless ``order`` is an integer >= 0."""
    if isinstance(order, bool) or not isinstance(order, int) or order < 0:
        raise ValueError(f"order must be an integer >= 0, not {order!r}.")


def _check_radius(radius: float) -> None:
    if not 0 <= radius <= MAX_RADIUS:
        raise ValueError(f"radius must be in [0, {MAX_RADIUS:g}], not {radius!r}.")
