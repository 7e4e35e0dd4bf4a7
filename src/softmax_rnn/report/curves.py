"""Loss curves out of run folders, ready to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from softmax_rnn.report.table import by_variant
from softmax_rnn.training.folder import RunFolder

_SMOOTHED_TO = 40  # points a training curve is averaged down to, at most


@dataclass(frozen=True)
class Curve:
    """The mean loss of one variant over its seeds and its 95% interval, against tokens."""

    variant: str
    tokens: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def last(self) -> float:
        """The last mean that is one; a training curve has gaps where no step made an update."""
        means = self.mean[~np.isnan(self.mean)]
        return float(means[-1]) if len(means) else math.nan


def curves(runs: Sequence[RunFolder], split: str) -> list[Curve]:
    """One curve a variant: ``test`` (every evaluation) or ``train`` (means over windows)."""
    drawn = []
    for variant, seeds in by_variant(runs).items():
        drawn.append(mean_curve(variant, [_rows(run, split) for run in seeds.values()]))
    return drawn


def mean_curve(variant: str, seeds: Sequence[pd.DataFrame]) -> Curve:
    """The curve of a variant from each seed's points: their tokens and losses."""
    tokens = np.mean([points.tokens for points in seeds], axis=0)  # of documents each has its own
    return Curve(variant, tokens, *seed_interval(np.stack([points.loss for points in seeds])))


def seed_interval(losses: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Mean and 95% interval over seeds, the first axis; with one seed the three are equal."""
    mean = losses.mean(axis=0)
    if len(losses) == 1:
        return mean, mean, mean
    half = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses, axis=0)
    return mean, mean - half, mean + half


def _rows(run: RunFolder, split: str) -> pd.DataFrame:
    """Tokens and loss of every point of a run's curve."""
    if split == "test":
        return run.evaluations.rename(columns={"test_loss": "loss"})
    rows = run.metrics
    return windows(rows, max(1, -(-len(rows) // _SMOOTHED_TO)))


def windows(rows: pd.DataFrame, size: int) -> pd.DataFrame:
    """Training rows as means over ``size`` of them, less those at the start that fill none."""
    rows = rows.iloc[len(rows) % size :]  # a short window at the end would make the curves jump
    window = np.arange(len(rows)) // size
    return rows.groupby(window).agg({"tokens": "last", "loss": "mean"})
