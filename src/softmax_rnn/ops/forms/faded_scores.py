"""Decays within a chunk: factors of pairs of positions, and scores with a decay per channel.

``exp(G_t - G_s)`` of a query ``t`` and an earlier key ``s`` is the product of two factors, if a
position ``m`` lies between them: ``exp(G_t - G_m) * exp(G_m - G_s)``. Neither exponent is positive.
So the positions are halved: the keys of the left half meet the queries of the right half, with the
last position of the left half as ``m``. Then both halves are halved, down to single positions. All
blocks of one size are computed together: a chunk of length ``L`` takes ``log2(L)`` steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Exponentials of less are 0: exponentials and products of denormal numbers are slow on a CPU.
_LOWEST = {torch.float32: -65.0, torch.float64: -700.0}


def faded(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """``exp(exponent)`` in ``dtype``, at most 1, and 0 for very low exponents; may overwrite it."""
    lowest = _LOWEST[dtype]
    factors = exponent.to(dtype).clamp_(lowest - 1, 0.0).exp_()
    return F.threshold(factors, math.exp(lowest), 0.0, inplace=True)


def pair_factors(total: Tensor, dtype: torch.dtype) -> Tensor:
    """``exp(G_t - G_s)`` of each key and query of a chunk, 0 for later keys.

    Args:
        total: ``G``, [N, L], the running sums of log decays, in float64 where there is one.
        dtype: of the result.

    Returns:
        [N, L, L]: a row per key, a column per query.
    """
    return faded(total.unsqueeze(1) - total.unsqueeze(2), dtype).triu_()


def faded_scores(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """``sum_c q_tc k_sc exp(G_tc - G_sc)`` of each key and query of a chunk, 0 for later keys.

    Args:
        q: queries, [N, D, G * L]; those of one head are adjacent.
        k: keys, [N, D, L].
        total: ``G``, [N, D, L], the running sums of log decays, in float64 where there is one.

    Returns:
        [N, L, G * L]: a row per key.
    """
    length = k.shape[2]
    q, k, total = _rows(q, k, total)
    scores = q.new_zeros(*k.shape[:2], *q.shape[1:3])  # [N, P, P, G]
    _diagonal(scores).copy_((q * k.unsqueeze(2)).sum(-1))
    for size, left, right in _halves(total, k.dtype):
        keys, queries = _left(k, size) * left, _right(q, size) * right.unsqueeze(-2)
        block = keys @ queries.flatten(2, 3).mT
        _blocks(scores, size).copy_(block.unflatten(-1, queries.shape[2:4]))
    return scores[:, :length, :length].movedim(-1, 2).flatten(2)


def faded_scores_backward(
    q: Tensor, k: Tensor, total: Tensor, dscores: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``q`` and ``k`` from that of their :func:`faded_scores`."""
    length = k.shape[2]
    q, k, total = _rows(q, k, total)
    dscores = dscores.unflatten(2, (-1, length)).movedim(2, -1)
    dscores = _padded(_padded(dscores, 1), 2)
    diagonal = _diagonal(dscores).unsqueeze(-1)
    dq, dk = diagonal * k.unsqueeze(2), (diagonal * q).sum(2)
    for size, left, right in _halves(total, k.dtype):
        keys, queries = _left(k, size) * left, _right(q, size) * right.unsqueeze(-2)
        block = _blocks(dscores, size).flatten(3)
        dqueries = (block.mT @ keys).view_as(queries)
        _right(dq, size).addcmul_(dqueries, right.unsqueeze(-2))
        _left(dk, size).addcmul_(block @ queries.flatten(2, 3), left)
    return dq[:, :length].permute(0, 3, 2, 1).flatten(2), dk[:, :length].mT


def _halves(total: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every size of half blocks, with the factors of left keys and of right queries.

    ``total`` is [N, P, D]; the factors are [N, P / (2 * size), size, D].
    """
    size = total.shape[1] // 2
    while size:
        middle = _left(total, size)[:, :, -1:]
        left, right = middle - _left(total, size), _right(total, size) - middle
        yield size, faded(left, dtype), faded(right, dtype)
        size //= 2


def _left(x: Tensor, size: int) -> Tensor:
    """The left half of each block of twice the size: [N, P, ...] as [N, P / 2 size, size, ...]."""
    return x.unflatten(1, (-1, 2, size))[:, :, 0]


def _right(x: Tensor, size: int) -> Tensor:
    return x.unflatten(1, (-1, 2, size))[:, :, 1]


def _blocks(pairs: Tensor, size: int) -> Tensor:
    """Left keys with right queries, of pairs [N, P, P, G]: [N, P / 2 size, size, size, G]."""
    halves = pairs.unflatten(2, (-1, 2, size)).unflatten(1, (-1, 2, size))
    return halves[:, :, 0, :, :, 1].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _diagonal(pairs: Tensor) -> Tensor:
    """The pairs of equal positions, of pairs [N, P, P, G]: [N, P, G]."""
    return pairs.diagonal(dim1=1, dim2=2).mT


def _rows(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, P, G, D], keys [N, P, D] and sums [N, P, D], a row per position."""
    queries = q.unflatten(2, (-1, k.shape[2])).permute(0, 3, 2, 1)
    rows = (_padded(x, 1).contiguous() for x in (queries, k.mT, total.mT))
    return tuple(rows)  # type: ignore[return-value]


def _padded(x: Tensor, dim: int) -> Tensor:
    """``x`` with zeros up to a power of two."""
    length = x.shape[dim]
    added = (1 << (length - 1).bit_length()) - length
    return x if not added else F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, added))
