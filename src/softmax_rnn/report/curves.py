"""Loss curves out of run folders, ready to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from softmax_rnn.report.table import by_variant
from softmax_rnn.training.folder import RunFolder

_SMOOTHED_TO = 40  # points a training curve is averaged down to, at most


@dataclass(frozen=True)
class Curve:
    """The loss of one variant over its seeds, against tokens."""

    variant: str
    tokens: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def curves(runs: Sequence[RunFolder], split: str) -> list[Curve]:
    """One curve a variant: ``test`` (every evaluation) or ``train`` (means over windows)."""
    drawn = []
    for variant, seeds in by_variant(runs).items():
        losses = pd.concat([_losses(run, split) for run in seeds.values()], axis=1)
        drawn.append(
            Curve(
                variant,
                losses.index.to_numpy(dtype=float),
                losses.mean(axis=1).to_numpy(),
                losses.min(axis=1).to_numpy(),
                losses.max(axis=1).to_numpy(),
            )
        )
    return drawn


def _losses(run: RunFolder, split: str) -> pd.Series[float]:
    if split == "test":
        return run.evaluations.set_index("tokens").test_loss
    rows = run.metrics
    window = np.arange(len(rows)) // max(1, -(-len(rows) // _SMOOTHED_TO))
    return rows.groupby(window).agg({"tokens": "last", "loss": "mean"}).set_index("tokens").loss
