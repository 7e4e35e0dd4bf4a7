"""Leaps of the training loss."""

from __future__ import annotations

import numpy as np
import pandas as pd

_WINDOW = 15  # rows of the recent past
_LEAST = 0.2  # nats
SEEN = _WINDOW + 2  # rows that decide on the last one


def spike_starts(losses: pd.Series[float]) -> pd.Series[bool]:
    """Where a training loss leaps above its recent past.

    A row starts a spike if it exceeds the median of the 15 rows before it by five of their median
    absolute deviations (as standard deviations) and by 0.2 nats, and the row before it does not.
    """
    before = losses.shift(1).rolling(_WINDOW)
    median = before.median()
    spread = 1.4826 * before.apply(lambda rows: np.median(np.abs(rows - np.median(rows))), raw=True)
    above = losses - median > np.maximum(5 * spread, _LEAST)
    return above & ~above.shift(1, fill_value=False)


def loss_spikes(losses: pd.Series[float]) -> int:
    """How often; see :func:`spike_starts`. Rows without a loss are left out."""
    return int(spike_starts(losses.dropna()).sum())
