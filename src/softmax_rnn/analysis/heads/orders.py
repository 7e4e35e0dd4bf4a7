"""The error of attention by a series of finite order, for every order, without storing weights.

A series is a sum of terms ``coefficient_n * basis_n(t)``, where ``t = (s - center) / radius`` is a
score relative to the range of its row, and ``|basis_n| <= 1``. Taylor's series about the center has
the basis ``t^n``. Chebyshev's has the Chebyshev polynomials; cut off after any term, it is near the
polynomial of that order with the smallest largest error on the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch
from scipy.special import ive
from torch import Tensor

from softmax_rnn.ops import MAX_RADIUS, SUM_GUARD

_NEGLIGIBLE = 1e-17  # relative to a row's weight sum; adding it does not change a float64 sum


class Rows(NamedTuple):
    """Some rows of attention in float64, whose weights are ``exp(scores) * factor``.

    Attributes:
        scores: [H, R, S], finite.
        factor: [H, R, S], in [0, 1]; 0 where the query does not see the key.
        v: values [H, S, E + 1]; the last channel is 1, so that it sums the weights.
        largest: [H], the largest absolute value of a head.
    """

    scores: Tensor
    factor: Tensor
    v: Tensor
    largest: Tensor

    def range(self) -> tuple[Tensor, Tensor]:
        """The middle of the visible scores of each row, and half their range, each [H, R]."""
        hidden = self.factor == 0
        top = self.scores.masked_fill(hidden, -torch.inf).amax(-1)
        bottom = self.scores.masked_fill(hidden, torch.inf).amin(-1)
        return (top + bottom) / 2, (top - bottom) / 2

    def relative(self, center: Tensor, radius: Tensor) -> Tensor:
        """``(s - center) / radius`` of visible keys, else 0."""
        unit = radius.clamp(min=torch.finfo(radius.dtype).tiny)
        x = (self.scores - center[..., None]) / unit[..., None]
        return x.masked_fill_(self.factor == 0, 0)

    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights [H, R, S] in units of ``exp(top)``, and ``top`` [H, R]."""
        top = self.scores.masked_fill(self.factor == 0, -torch.inf).amax(-1)
        return (self.scores - top[..., None]).clamp_(max=0).exp_().mul_(self.factor), top

    def exact(self) -> tuple[Tensor, Tensor]:
        """The sums ``sum_s w v_s`` [H, R, E + 1] in units of ``exp(top)``, and ``top`` [H, R]."""
        weights, top = self.weights()
        return weights @ self.v, top


Terms = Iterator[tuple[Tensor, Tensor]]  # coefficient [H, R] and basis * factor [H, R, S]


def taylor(rows: Rows, center: Tensor, radius: Tensor) -> Terms:
    """The terms of exp's Taylor series about ``center``, divided by ``exp(min(radius, 700))``.

    The basis is overwritten by the next one.
    """
    t = rows.relative(center, radius)
    coefficient, basis = (-radius.clamp(max=MAX_RADIUS)).exp(), rows.factor.clone()
    for n in count(1):
        yield coefficient, basis
        coefficient = coefficient * (radius / n)
        basis.mul_(t)


def chebyshev(rows: Rows, center: Tensor, radius: Tensor) -> Terms:
    """The terms of exp's Chebyshev series on ``center +- radius``, divided by ``exp(radius)``.

    ``exp(r t) = I_0(r) + 2 sum_n I_n(r) T_n(t)``, with the modified Bessel functions ``I_n``.
    """
    t = rows.relative(center, radius)
    at = radius.cpu().numpy()
    before, basis = rows.factor * t, rows.factor  # T_-1 = T_1
    for n in count():
        yield torch.from_numpy((2 if n else 1) * ive(n, at)).to(radius), basis
        before, basis = basis, torch.addcmul(-before, t, basis, value=2)


def summed(terms: Terms, rows: Rows) -> Terms:
    """The sums of each term over the keys: ``basis @ v`` [H, R, E + 1] instead of the basis."""
    return ((coefficient, basis @ rows.v) for coefficient, basis in terms)


def add_errors(errors: Tensor, rows: Rows, sums: Terms, unit: Tensor) -> None:
    """Add to ``errors`` [H, N + 1] those of every order up to N, summed over the rows.

    The error is the relative L2 error of the quotient of numerator and row sum, against softmax. As
    in ``attention``, a row sum that crosses zero is kept so large that no output is above
    ``1 / SUM_GUARD`` times the largest value.

    Args:
        errors: of each order.
        rows: the rows.
        sums: the coefficients and the sums of the terms.
        unit: the logarithm of what the coefficients were divided by, [H, R].
    """
    exact, top = rows.exact()
    weight = exact[..., -1] * (top - unit).exp()
    out = exact[..., :-1] / exact[..., -1:]
    size = out.norm(dim=-1).clamp(min=torch.finfo(out.dtype).tiny)  # a row of zeros: error 0
    mass = rows.factor.sum(-1)
    partial, previous = torch.zeros_like(exact), torch.zeros_like(top)
    for n, (coefficient, added) in enumerate(sums):
        partial += coefficient[..., None] * added
        numerator, total = partial[..., :-1], partial[..., -1]
        least = SUM_GUARD * numerator.abs().amax(-1) / rows.largest[:, None]
        total = torch.where(total.abs() < least, torch.where(total < 0, -least, least), total)
        error = numerator / total.masked_fill(total == 0, 1)[..., None] - out
        mean = (error.norm(dim=-1) / size).sum(-1)
        # Coefficients rise to a single maximum and then fall. Once they are negligible, later
        # orders have the same error.
        bound = _NEGLIGIBLE * weight / mass
        settled = bool(((coefficient <= previous) & (coefficient <= bound)).all())
        if settled or n + 1 == errors.shape[1]:
            errors[:, n:] += mean[:, None]
            return
        errors[:, n] += mean
        previous = coefficient
