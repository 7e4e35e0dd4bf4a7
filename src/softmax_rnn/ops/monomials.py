"""Symmetric powers: the monomials of a vector in place of its Kronecker powers.

``(q . k)^n = q^(x)n . k^(x)n`` (equations 7, 8, ``reference.kronecker_power``) has ``d^n`` terms. A
Kronecker power contains each monomial of degree ``n`` several times: once per order of its factors.
The ``C(d+n-1, n)`` distinct monomials give the same inner product, if each is weighted by its
number of occurrences ``n! / alpha!``.

The monomials of degree ``n`` are ordered by their largest index. Those with the largest index ``j``
are the monomials of degree ``n - 1`` in ``x_0 .. x_j``, times ``x_j``. The monomials in
``x_0 .. x_j`` are a prefix of degree ``n - 1``. So each degree is built from the previous degree by
``d`` products of a slice and a row.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from math import comb
from operator import index
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.variants import resolve


def dimension(width: int, degree: int) -> int:
    """Number of monomials of degree ``degree``: ``C(width + degree - 1, degree)``."""
    return comb(width + degree - 1, degree)


def cumulative_dimension(width: int, degree: int) -> int:
    """Number of monomials of degree 0 to ``degree``: ``C(width + degree, degree)``."""
    return comb(index(width) + degree, degree)  # index() also converts a traced size


def state_size(spec: AttentionSpec | str, d_k: int, d_v: int) -> int:
    """Number of elements in a head's state: per monomial, a row of values and any weight sum.

    The keys and values of a window are not included.

    Args:
        spec: a finite series, or the name of a variant with one.
        d_k: key width.
        d_v: value width.

    Raises:
        ValueError: for a spec without a state (the series exp, section 3.1; a clamp; or a window
            that hides keys).
    """
    spec = resolve(spec)
    return state_rows(spec, d_k) * (d_v + int(spec.row_sum is not None))


def state_rows(spec: AttentionSpec, width: int) -> int:
    """Number of monomials in the state of a finite series."""
    first, last = spec.powers or degrees(spec)
    return cumulative_dimension(width, last) - (
        cumulative_dimension(width, first - 1) if first else 0
    )


def degrees(spec: AttentionSpec) -> tuple[int, int]:
    """The lowest and the highest power of a spec; ``ValueError`` if it has no state."""
    if spec.clamp is not None:
        raise ValueError(
            f"A clamped score (clamp={spec.clamp}) is not a sum of powers of q . k and has no "
            "recurrent form; use clamp=None."
        )
    if spec.hiding_window is not None:
        raise ValueError(
            f"A window (window={spec.window}) has no recurrent form: a state is a sum, and keys "
            "cannot be taken out of it. A finite series with outside='series' has one, as the "
            f"layer 'window_state:{spec.window}' has; or keep the last keys and values in a cache."
        )
    if spec.order is None:
        raise ValueError(
            "The series 'exp' has infinitely many powers and no finite state; series='taylor' "
            "with an order has one."
        )
    assert spec.powers is not None
    return spec.powers


def monomials(x: Tensor, degree: int) -> Tensor:
    """All monomials of degree 0 to ``degree``.

    Args:
        x: [..., d, T], a vector per column.
        degree: the highest degree.

    Returns:
        [..., C(d + degree, degree), T]: ordered by degree, then by largest index.
    """
    *batch, width, length = x.shape
    if length <= _FEW_COLUMNS:
        levels = map(torch.from_numpy, _levels(width, degree))
        parts = [x.new_ones(*batch, 1, length), x][: degree + 1]
        for parents, factors in islice(levels, 1, None):
            above = parts[-1].index_select(-2, parents.to(x.device))
            parts.append(above * x.index_select(-2, factors.to(x.device)))
        return torch.cat(parts, dim=-2)
    out = x.new_empty(*batch, cumulative_dimension(width, degree), length)
    out[..., 0, :] = 1.0
    if degree:
        out[..., 1 : width + 1, :] = x
    # All views at once: for short columns, creating views takes as long as the products.
    factors = x.unsqueeze(-3).unbind(-2)
    products = _products(width, degree)
    first = cumulative_dimension(width, min(degree, 1))
    views = out.split([first, *(product.size for product in products)], -2)[1:]
    for product, row in zip(products, views, strict=True):
        above = out.narrow(-2, product.parents, product.size)
        torch.mul(above, factors[product.factor], out=row)
    return out


def monomials_backward(x: Tensor, degree: int, features: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``x``, from ``features = monomials(x, degree)`` and their ``grad``.

    Overwrites ``grad``.
    """
    width = x.shape[-2]
    out = torch.zeros_like(x)
    for start, parents, size, factor in reversed(_products(width, degree)):
        above = grad.narrow(-2, start, size)
        out[..., factor, :] += (above * features.narrow(-2, parents, size)).sum(-2)
        grad.narrow(-2, parents, size).addcmul_(above, x[..., factor, None, :])
    if degree:
        out += grad[..., 1 : width + 1, :]
    return out


def multiplicities(width: int, degree: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """``n! / alpha!`` of every monomial ``alpha`` of degree ``n`` = 0 to ``degree``, in order.

    ``sum(multiplicities * monomials(q) * monomials(k))`` over one degree is ``(q . k)^n``.
    """
    largest, repeated, counts = np.array([-1]), np.array([0]), [np.ones(1)]
    for order, (parents, factors) in enumerate(_levels(width, degree), 1):
        # How often the largest index of a monomial occurs in it.
        repeated = np.where(largest[parents] == factors, repeated[parents] + 1, 1)
        counts.append(counts[-1][parents] * order / repeated)
        largest = factors
    return np.concatenate(counts)


def row_weights(
    spec: AttentionSpec,
    width: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The weight of every state row of a finite series: ``a_n * n! / alpha!``; [rows].

    ``sum(row_weights * monomials(q) * monomials(k)) = w(q . k)``, over the rows of the state.
    Learned coefficients ``a_n``, which differ between heads, count as 1.
    """
    first, last = degrees(spec)
    coefficients = PowerSeries.known_part(spec).coefficients
    sizes = [dimension(width, n) for n in range(last + 1)]
    weights = multiplicities(width, last) * np.repeat(np.array(coefficients, dtype=float), sizes)
    return torch.tensor(weights[sum(sizes[:first]) :], dtype=dtype, device=device)


# Up to this number of columns, a gather is faster than one product per index.
_FEW_COLUMNS = 4


Indices = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class _Product(NamedTuple):
    """``size`` monomials from row ``start`` are those from row ``parents`` times ``x[factor]``."""

    start: int
    parents: int
    size: int
    factor: int


@lru_cache(maxsize=64)
def _products(width: int, degree: int) -> tuple[_Product, ...]:
    """The products that build the degrees from 2 on, in order."""
    products = []
    for order in range(2, degree + 1):
        start = cumulative_dimension(width, order - 1)
        parents = cumulative_dimension(width, order - 2)
        for factor in range(width):
            size = dimension(factor + 1, order - 1)
            products.append(_Product(start, parents, size, factor))
            start += size
    return tuple(products)


# Arrays are cached instead of tensors: a tensor that was created in inference mode or while tracing
# cannot be used later.
@lru_cache(maxsize=64)
def _levels(width: int, degree: int) -> tuple[Indices, ...]:
    """For each degree from 1 on: the parents' positions in the previous degree, and the factors."""
    levels = []
    for order in range(1, degree + 1):
        sizes = [dimension(factor + 1, order - 1) for factor in range(width)]
        parents = np.concatenate([np.arange(size) for size in sizes])
        levels.append(np.stack([parents, np.repeat(np.arange(width), sizes)]))
    return tuple(levels)


def monomial_factors(width: int, degree: int) -> Indices:
    """For each monomial the place of its parent and its factor; [2, C(width + degree, degree)].

    The first one, 1, has neither: its numbers are 0.
    """
    levels, places, start = _levels(width, degree), [np.zeros((2, 1), np.int64)], 0
    for level in levels:
        places.append(level + np.array([[start], [0]]))
        start += len(places[-2][0])
    return np.concatenate(places, axis=1)
