"""Padding moved to the front of every row, so that it counts in no window.

A window is a number of slots. If every hidden slot comes before every visible one, the last slots
are the last visible tokens, wherever the padding was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import no_data


def hidden_first(shown: Tensor) -> Tensor | None:
    """The order [B, S] of the slots ``shown`` [B, S]: hidden ones first, else as they are.

    ``None`` if they are in this order already, which compiled graphs cannot know.
    """
    if not no_data(shown) and bool((shown[:, 1:] >= shown[:, :-1]).all()):
        return None
    return shown.to(torch.uint8).argsort(dim=1, stable=True)


def taken(x: Tensor, order: Tensor, dim: int = 2) -> Tensor:
    """``x`` [B, ..., S, ...] with its slots, the dimension ``dim``, in an order [B or 1, S]."""
    shape = [1] * x.ndim
    shape[0], shape[dim] = order.shape
    return x.gather(dim, order.view(shape).expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


class Packed:
    """The tokens of one call in the order :func:`hidden_first`.

    Args:
        mask: [B or 1, 1, 1, S or 1], False for padding.
        q: queries [B, H, T, D], the last T slots.
        k: keys [B, Hkv, S, D].
    """

    def __init__(self, mask: Tensor, q: Tensor, k: Tensor) -> None:
        queries, keys = q.shape[2], k.shape[2]
        shown = mask[:, 0, 0].expand(q.shape[0], keys)
        self.mask = shown[:, None, None]
        self.key_order = hidden_first(shown)
        self.query_order = hidden_first(shown[:, keys - queries :])
        if self.key_order is not None:
            self.mask = taken(self.mask, self.key_order, dim=3)

    def of_keys(self, *tensors: Tensor | None) -> list[Any]:
        """Tensors of keys, [B, Hkv, S] or [B, Hkv, S, D], in their order; others as they are."""
        return _in_order(tensors, self.key_order)

    def of_queries(self, *tensors: Tensor | None) -> list[Any]:
        """Tensors of queries, [B, H, T] or [B, H, T, D], in their order."""
        return _in_order(tensors, self.query_order)

    def restored(self, out: Tensor) -> Tensor:
        """The output [B, H, T, E] in the order of the given queries."""
        return out if self.query_order is None else taken(out, self.query_order.argsort(dim=1))


def _in_order(tensors: Iterable[Tensor | None], order: Tensor | None) -> list[Tensor | None]:
    return [x if x is None or order is None or x.ndim < 3 else taken(x, order) for x in tensors]
