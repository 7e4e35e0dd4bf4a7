"""Scores with a decay per channel, ``x_ts = sum_c q_tc k_sc exp(G_tc - G_sc)``, and gradients.

``exp(-G_s)`` alone would overflow. But with a reference point ``R`` between key and query both
``G_t - R`` and ``R - G_s`` are <= 0, and the scores are a product of faded queries and faded keys.
For all keys before a block of queries, ``R`` is the block's first position. The block itself is
halved: for queries of its second half and keys of its first half, ``R`` is the middle. Both halves
are halved again, until only keys at the queries' own positions remain, which do not fade.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.forms.exponential import exp_

_SCORES = "hgnid,hnjd->hgnij"
_TO_QUERIES = "hgnij,hnjd->hgnid"
_TO_KEYS = "hgnij,hgnid->hnjd"


def channel_scores(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """The scores [heads, G, T, S]; 0 for keys after their query.

    Args:
        q: queries [heads, G, T, D], at the last T positions.
        k: keys [heads, S, D].
        total: running sums of the log decays [heads, S, D] in float64. Earlier keys than the
            queries' may be in any order.
    """
    rows, keys = q.shape[2], k.shape[1]
    q, k = _padded(q, k)
    x = q.new_zeros(*q.shape[:3], k.shape[1])
    fades = _fades(total, rows, q.dtype)
    for (q_part, k_part, x_part), (fade_q, fade_k) in zip(_parts(q, k, x), fades, strict=True):
        x_part.copy_(torch.einsum(_SCORES, q_part * fade_q, k_part * fade_k))
    return x[:, :, :rows, :keys]


def channel_gradients(dx: Tensor, q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``q`` and ``k`` from those of the scores."""
    rows, keys = q.shape[2], k.shape[1]
    q, k = _padded(q, k)
    dx = F.pad(dx, (0, k.shape[1] - keys, 0, q.shape[2] - rows))
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    parts = zip(_parts(q, k, dx), _parts(dq, dk, dx), strict=True)
    fades = _fades(total, rows, q.dtype)
    for ((q_part, k_part, dx_part), into), (fade_q, fade_k) in zip(parts, fades, strict=True):
        into[0].add_(torch.einsum(_TO_QUERIES, dx_part, k_part * fade_k) * fade_q)
        into[1].add_(torch.einsum(_TO_KEYS, dx_part, q_part * fade_q) * fade_k)
    return dq[:, :, :rows], dk[:, :keys]


def _padding(rows: int) -> int:
    """How many rows are added, so that they can be halved down to one."""
    return (1 << (rows - 1).bit_length()) - rows


def _padded(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    more = _padding(q.shape[2])
    return F.pad(q, (0, 0, 0, more)), F.pad(k, (0, 0, 0, more))


def _parts(q: Tensor, k: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of queries [h, G, n, i, D], keys [h, n, j, D] and scores [h, G, n, i, j] of a product.

    ``n`` products of equal size are computed together.
    """
    rows = q.shape[2]
    before = k.shape[1] - rows
    yield q.unsqueeze(2), k[:, :before].unsqueeze(1), x[..., :before].unsqueeze(2)
    k, x = k[:, before:], x[..., before:]
    yield q.unsqueeze(3), k.unsqueeze(2), x.diagonal(dim1=2, dim2=3)[..., None, None]
    for size in _halves(rows):
        halves = (rows // (2 * size), 2, size)
        pairs = x.unflatten(3, halves).unflatten(2, halves)[:, :, :, 1, :, :, 0]
        x_part = pairs.diagonal(dim1=2, dim2=4).movedim(-1, 2)
        yield q.unflatten(2, halves)[:, :, :, 1], k.unflatten(1, halves)[:, :, 0], x_part


def _fades(total: Tensor, rows: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """The factors of queries [h, 1, n, i, D] and keys [h, n, j, D], in the order of ``_parts``."""

    def factor(exponent: Tensor) -> Tensor:
        return exp_(exponent.clamp(max=0.0).to(dtype))

    before, own = total[:, : total.shape[1] - rows], total[:, total.shape[1] - rows :]
    reference = own[:, :1]
    # Rows that only fill up have queries and keys of zero.
    own = F.pad(own, (0, 0, 0, _padding(rows)))
    yield factor(own - reference)[:, None, None], factor(reference - before).unsqueeze(1)
    one = torch.ones((), dtype=dtype, device=total.device)
    yield one, one
    for size in _halves(own.shape[1]):
        first, second = own.unflatten(1, (-1, 2, size)).unbind(2)
        reference = second[:, :, :1]
        yield factor(second - reference).unsqueeze(1), factor(reference - first)


def _halves(rows: int) -> list[int]:
    """``rows / 2``, ``rows / 4``, ... 1; ``rows`` is a power of two."""
    return [rows >> level for level in range(1, rows.bit_length())]
