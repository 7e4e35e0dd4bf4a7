"""Symmetric powers: the monomials of a vector in place of its Kronecker powers.

``(q . k)^n = q^(x)n . k^(x)n`` (equations 7 and 8) has ``d^n`` terms, but a Kronecker power holds
every monomial of degree ``n`` once per order of its factors. The ``C(d+n-1, n)`` different ones,
weighted by how often they occur (``n! / alpha!``), give the same inner product.

The monomials of degree ``n`` stand by their largest index: those whose largest index is ``j`` are
the monomials of degree ``n - 1`` in ``x_0 .. x_j``, times ``x_j``. In this order the former are a
prefix of degree ``n - 1``, so that a degree is built from the last one by ``d`` products of a
slice with a row, and nothing is gathered.
"""

from __future__ import annotations

from functools import lru_cache
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
    """Monomials of one degree in ``width`` variables: ``C(width + degree - 1, degree)``."""
    return comb(width + degree - 1, degree)


def cumulative_dimension(width: int, degree: int) -> int:
    """Number of monomials of degree 0 to ``degree``: ``C(width + degree, degree)``."""
    return comb(index(width) + degree, degree)  # a number, also of a size that is being traced


def state_size(spec: AttentionSpec | str, d_k: int, d_v: int) -> int:
    """Numbers a head holds in the recurrent form: a row of values per monomial, and its weight sum.

    Args:
        spec: a finite series, or the name of a variant with one.
        d_k: key width.
        d_v: value width.

    Raises:
        ValueError: for the series exp, whose state is infinite (section 3.1).
    """
    spec = resolve(spec)
    return state_rows(spec, d_k) * (d_v + int(spec.row_sum is not None))


def state_rows(spec: AttentionSpec, width: int) -> int:
    """Monomials that the state of a finite series keeps."""
    first, last = degrees(spec)
    return cumulative_dimension(width, last) - (
        cumulative_dimension(width, first - 1) if first else 0
    )


def degrees(spec: AttentionSpec) -> tuple[int, int]:
    """The lowest and the highest power of a finite series."""
    if spec.order is None:
        raise ValueError(
            "The series 'exp' has infinitely many powers and no finite state; series='taylor' "
            "with an order has one."
        )
    return (spec.order if spec.series == "power" else 0), spec.order


class Gathers(NamedTuple):
    """What to gather for monomials and their gradient: few operations, where products are many.

    Attributes:
        levels: [2, rows] of each degree from 2 on: the row of the degree below, and the factor.
        raised: [d, lower], of each monomial below the highest degree: the row of ``x_j`` times it.
        powers: [d, lower, 1], the power of ``x_j`` in that.
    """

    levels: tuple[Tensor, ...]
    raised: Tensor
    powers: Tensor

    @classmethod
    def of(cls, width: int, degree: int, like: Tensor) -> Gathers:
        """Those of ``width`` variables up to ``degree``, for tensors like ``like``."""
        raised, powers = (torch.from_numpy(x).to(like.device) for x in _raised(width, degree))
        levels = (torch.from_numpy(x).to(like.device) for x in _levels(width, degree))
        return cls(tuple(levels), raised, powers.to(like.dtype).unsqueeze(-1))


def monomials(x: Tensor, degree: int, gathers: Gathers | None = None) -> Tensor:
    """All monomials of degree 0 to ``degree``.

    Args:
        x: [..., d, T], a vector per column.
        degree: the highest degree.
        gathers: to be made by these, all of a degree at once.

    Returns:
        [..., C(d + degree, degree), T]: degree after degree, each by its largest index.
    """
    *batch, width, length = x.shape
    if gathers is not None or length <= _FEW:
        levels = gathers.levels if gathers else map(torch.from_numpy, _levels(width, degree))
        parts = [x.new_ones(*batch, 1, length), x][: degree + 1]
        for parents, factors in levels:
            above = parts[-1].index_select(-2, parents.to(x.device))
            parts.append(above * x.index_select(-2, factors.to(x.device)))
        return torch.cat(parts, dim=-2)
    out = x.new_empty(*batch, cumulative_dimension(width, degree), length)
    out[..., 0, :] = 1.0
    if degree:
        out[..., 1 : width + 1, :] = x
    # Views made all at once: for short columns they cost as much as the products.
    factors = x.unsqueeze(-3).unbind(-2)
    products = _products(width, degree)
    first = cumulative_dimension(width, min(degree, 1))
    views = out.split([first, *(product.size for product in products)], -2)[1:]
    for product, row in zip(products, views, strict=True):
        above = out.narrow(-2, product.parents, product.size)
        torch.mul(above, factors[product.factor], out=row)
    return out


def monomials_backward(
    x: Tensor, degree: int, features: Tensor, grad: Tensor, gathers: Gathers | None = None
) -> Tensor:
    """The gradient of ``x`` given that of ``monomials(x, degree)``, which it overwrites.

    Args:
        x: [..., d, T].
        degree: as it was.
        features: ``monomials(x, degree)``.
        grad: the gradient of ``features``; used up.
        gathers: as it was.
    """
    width = x.shape[-2]
    if gathers is not None:  # d(m x_j)/dx_j = m times the power of x_j in m x_j
        lower = features[..., : gathers.raised.shape[1], :].unsqueeze(-3)
        above = grad.index_select(-2, gathers.raised.flatten()).unflatten(-2, gathers.raised.shape)
        return (above * lower * gathers.powers).sum(-2)
    out = torch.zeros_like(x)
    for _, start, parents, size, factor in reversed(_products(width, degree)):
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
    counts = np.ones(cumulative_dimension(width, degree))
    # How often the largest index of a monomial occurs in it: each further time divides by more.
    repeated = np.ones(len(counts), dtype=np.int64)
    for order, start, parents, size, factor in _products(width, degree):
        rows, above = slice(start, start + size), slice(parents, parents + size)
        times = np.ones(size, dtype=np.int64)
        same = dimension(factor + 1, order - 2)  # the last parents, whose largest index is this
        times[-same:] = repeated[above][-same:] + 1
        repeated[rows] = times
        counts[rows] = counts[above] * order / times
    return counts


def row_weights(
    spec: AttentionSpec,
    width: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The weight of every state row of a finite series: ``a_n * n! / alpha!``; [rows].

    ``sum(row_weights * monomials(q) * monomials(k)) = w(q . k)``, over the rows of the state.
    """
    return torch.tensor(_row_weights(spec, width), dtype=dtype, device=device)


# Arrays are kept, not tensors: a tensor made under inference mode, or without data while something
# is traced, would not do for the next call.
@lru_cache(maxsize=64)
def _row_weights(spec: AttentionSpec, width: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    first, last = degrees(spec)
    coefficients = PowerSeries.of(spec).coefficients
    assert coefficients is not None
    sizes = [dimension(width, n) for n in range(last + 1)]
    every = multiplicities(width, last) * np.repeat(coefficients, sizes)
    return every[sum(sizes[:first]) :]


# Columns up to which a gather is faster than a product per index.
_FEW = 4


Indices = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class _Product(NamedTuple):
    """``size`` monomials from row ``start`` are those from row ``parents`` times ``x[factor]``."""

    order: int
    start: int
    parents: int
    size: int
    factor: int


@lru_cache(maxsize=64)
def _products(width: int, degree: int) -> tuple[_Product, ...]:
    """What makes the degrees from 2 on, in order."""
    products = []
    for order in range(2, degree + 1):
        start = cumulative_dimension(width, order - 1)
        parents = cumulative_dimension(width, order - 2)
        for factor in range(width):
            size = dimension(factor + 1, order - 1)
            products.append(_Product(order, start, parents, size, factor))
            start += size
    return tuple(products)


@lru_cache(maxsize=64)
def _levels(width: int, degree: int) -> tuple[Indices, ...]:
    """The same by degree, for a gather: the parent, counted within its degree, and the factor."""
    levels = []
    for order in range(2, degree + 1):
        level = [p for p in _products(width, degree) if p.order == order]
        first = level[0].parents
        parents = np.concatenate([np.arange(p.parents, p.parents + p.size) for p in level]) - first
        factors = np.repeat([p.factor for p in level], [p.size for p in level])
        levels.append(np.stack([parents, factors]))
    return tuple(levels)


@lru_cache(maxsize=64)
def _raised(width: int, degree: int) -> tuple[Indices, Indices]:
    """The row of ``m x_j`` and the power of ``x_j`` in it, of all ``m`` of lower degrees."""
    rows, powers = [np.empty((0, width), np.int64)], [np.empty((0, width), np.int64)]
    monomials = np.empty((1, 0), np.int64)  # of a degree, each as its indices in order
    for order in range(1, degree + 1):
        factors = np.tile(np.arange(width), len(monomials))[:, None]
        products = np.sort(np.hstack([monomials.repeat(width, axis=0), factors]), axis=1)
        # Before the monomials whose largest index is i stand those in x_0 .. x_(i-1).
        before = np.array([[dimension(i, n) for i in range(width)] for n in range(1, order + 1)])
        place = before[np.arange(order), products].sum(axis=1)
        rows.append((cumulative_dimension(width, order - 1) + place).reshape(-1, width))
        powers.append((products == factors).sum(axis=1).reshape(-1, width))
        monomials = products[np.unique(place, return_index=True)[1]]
    return np.concatenate(rows).T.copy(), np.concatenate(powers).T.copy()
