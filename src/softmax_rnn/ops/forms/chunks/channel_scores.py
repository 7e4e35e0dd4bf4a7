"""Scores with a decay per channel, ``x_ts = sum_c q_tc k_sc exp(G_tc - G_sc)``, and gradients.

``exp(-G_s)`` alone would overflow. But with a reference point ``R`` between key and query both
``G_t - R`` and ``R - G_s`` are <= 0, and the scores are a product of faded queries and faded keys.
For all keys before a block of queries, ``R`` is the block's first position. The block itself is
halved: for queries of its second half and keys of its first half, ``R`` is the last position of the
first half. Both halves are halved again, until only keys at the queries' own positions remain,
which do not fade. All products of one size are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.decay import fade_


def channel_scores(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """The scores [heads, R, T, S]; 0 for keys after their query.

    Args:
        q: queries [heads, R, T, D], at the last T positions.
        k: keys [heads, S, D].
        total: running sums of the log decays [heads, S, D], in float64 where there is one. Earlier
            keys than the queries' may be in any order.
    """
    rows, keys = q.shape[2], k.shape[1]
    q, k, total = _padded(q, k, total)
    x = q.new_zeros(len(q), q.shape[2], q.shape[1], k.shape[1])
    own = k[:, -q.shape[1] :].unsqueeze(2)
    _own(x).copy_((q * own).sum(-1))
    for size, fade_q, fade_k in _fades(total, q):
        q_part, k_part, x_part = _part(size, q, k, x)
        product = (q_part * fade_q).flatten(2, 3) @ (k_part * fade_k).mT
        x_part.copy_(product.view(x_part.shape))
    return x[:, :, :rows, :keys]


def channel_gradients(dx: Tensor, q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``q`` and ``k`` from those of the scores."""
    rows, keys = q.shape[2], k.shape[1]
    q, k, total = _padded(q, k, total)
    dx = F.pad(dx, (0, k.shape[1] - keys, 0, q.shape[1] - rows))
    dk, own = torch.zeros_like(k), slice(k.shape[1] - q.shape[1], None)
    dq = _own(dx).unsqueeze(-1) * k[:, own].unsqueeze(2)
    dk[:, own] = (_own(dx).unsqueeze(-1) * q).sum(2)
    for size, fade_q, fade_k in _fades(total, q):
        q_part, k_part, x_part = _part(size, q, k, dx)
        dq_part, dk_part, _ = _part(size, dq, dk, dx)
        block = x_part.flatten(2, 3)
        dq_part.addcmul_((block @ (k_part * fade_k)).view(q_part.shape), fade_q)
        dk_part.addcmul_(block.mT @ (q_part * fade_q).flatten(2, 3), fade_k)
    return dq[:, :rows].transpose(1, 2), dk[:, :keys]


def _padded(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [heads, P, R, D], and zeros after the keys, where P is a power of two."""
    rows = q.shape[2]
    more = (1 << (rows - 1).bit_length()) - rows
    q, k, total = (x if not more else F.pad(x, (0, 0, 0, more)) for x in (q, k, total))
    return q.transpose(1, 2).contiguous(), k, total


def _own(x: Tensor) -> Tensor:
    """The scores of keys at the queries' own positions, [heads, P, R], of [heads, R, P, K]."""
    return x[..., x.shape[3] - x.shape[2] :].diagonal(dim1=2, dim2=3).mT


def _part(size: int, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the factors and scores of ``n`` products of one size; 0 is keys before the block.

    Queries [heads, n, i, R, D], keys [heads, n, j, D] and scores [heads, n, i, R, j].
    """
    before = k.shape[1] - q.shape[1]
    x = x.transpose(1, 2)
    if not size:
        return q.unsqueeze(1), k[:, :before].unsqueeze(1), x[..., :before].unsqueeze(1)
    halves = (-1, 2, size)
    pairs = x[..., before:].unflatten(3, halves).unflatten(1, halves)[:, :, 1, :, :, :, 0]
    x = pairs.diagonal(dim1=1, dim2=4).movedim(-1, 1)
    return q.unflatten(1, halves)[:, :, 1], k[:, before:].unflatten(1, halves)[:, :, 0], x


def _fades(total: Tensor, q: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each size of products, with the factors of queries [heads, n, i, 1, D] and of keys."""
    rows = q.shape[1]
    before, own = total[:, : total.shape[1] - rows], total[:, total.shape[1] - rows :]
    if before.shape[1]:
        reference = own[:, :1]
        exponents = own - reference, reference - before
        to_query, to_key = (fade_(x.to(q.dtype)).unsqueeze(1) for x in exponents)
        yield 0, to_query.unsqueeze(3), to_key
    size = rows // 2
    while size:
        first, second = own.unflatten(1, (-1, 2, size)).unbind(2)
        reference = first[:, :, -1:]
        to_query, to_key = (fade_(x.to(q.dtype)) for x in (second - reference, reference - first))
        yield size, to_query.unsqueeze(3), to_key
        size //= 2
