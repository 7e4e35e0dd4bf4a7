"""Where the softmax weights of the heads of one layer are: sums over rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softmax_rnn.analysis.heads.orders import Rows

RECENT_KEYS = 16  # the keys of ``recent_share``, the query's own among them


class WeightSums:
    """The sums of one layer's heads.

    Args:
        like: [H], for device and dtype.
    """

    def __init__(self, like: Tensor) -> None:
        self.first, self.recent, self.range, self.entropy = (
            torch.zeros_like(like) for _ in range(4)
        )
        self.rows = self.choices = 0

    def add(self, rows: Rows, seen: Tensor, first: int, sink: Tensor | None) -> None:
        """Add rows.

        Args:
            rows: the rows.
            seen: [R, S], the keys that they see.
            first: the sequence's first key.
            sink: [H], if there is one.
        """
        weights, top = rows.weights()
        total = weights.sum(-1)
        shares = weights / total[..., None]
        self.entropy += torch.special.entr(shares).sum((1, 2))
        if sink is not None:
            shares *= (total / (total + (sink.to(top)[:, None] - top).exp()))[..., None]
        count = seen.sum(-1)
        choice = seen[:, first] & (count > 1)
        self.first += shares[:, choice, first].sum(1)
        recent = seen & (seen.cumsum(-1) > count[:, None] - RECENT_KEYS)
        self.recent += (shares * recent).sum((1, 2))
        _, radius = rows.range()
        self.range += 2 * radius.sum(1)
        self.rows += len(seen)
        self.choices += int(choice.sum())

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """The layer's columns of ``Analysis.heads``."""
        sums = {
            "sink_share": self.first / (self.choices or np.nan),
            "recent_share": self.recent / self.rows,
            "score_range": self.range / self.rows,
            "effective_keys": (self.entropy / self.rows).exp(),
        }
        return {name: values.cpu().numpy() for name, values in sums.items()}
