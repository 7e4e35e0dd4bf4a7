"""Loss curves out of run folders, ready to draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from softmax_rnn.report.table import by_variant
from softmax_rnn.training.folder import RunFolder

# Fewer seeds are drawn each: a 95% interval of two is 9 times as wide as they lie apart.
_FEWEST = 3
_SMOOTHED_TO = 40  # points a training curve is averaged down to, at most


@dataclass(frozen=True)
class Curve:
    """The loss of one variant against tokens: of its seeds, their mean and its 95% interval."""

    variant: str
    tokens: NDArray[np.float64]
    seeds: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def has_band(self) -> bool:
        """Whether there are seeds enough for an interval."""
        return len(self.seeds) >= _FEWEST

    @property
    def single(self) -> NDArray[np.float64]:
        """The seeds that are drawn each."""
        return drawn_each(self.seeds)

    @property
    def last(self) -> float:
        """The last mean; a training curve has gaps (NaN) where no step made an update."""
        means = self.mean[~np.isnan(self.mean)]
        return float(means[-1]) if len(means) else math.nan


def curves(runs: Sequence[RunFolder], split: str) -> list[Curve]:
    """One curve per variant: ``test`` (every evaluation) or ``train`` (means over windows)."""
    drawn = []
    for variant, seeds in by_variant(runs).items():
        drawn.append(mean_curve(variant, [_rows(run, split) for run in seeds.values()]))
    return drawn


def mean_curve(variant: str, seeds: Sequence[pd.DataFrame]) -> Curve:
    """The curve of a variant from each seed's points: their tokens and losses."""
    tokens = np.mean([points.tokens for points in seeds], axis=0)  # of documents each has its own
    losses = np.stack([points.loss for points in seeds])
    return Curve(variant, tokens, losses, *seed_interval(losses))


def seed_interval(losses: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Mean over seeds, the first axis, and its 95% interval; of fewer than three just the mean."""
    mean = losses.mean(axis=0)
    if len(losses) < _FEWEST:
        return mean, mean, mean
    half = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses, axis=0)
    return mean, mean - half, mean + half


def drawn_each(seeds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The seeds (first axis) to draw each: where there are several, but too few for a band."""
    return seeds if 1 < len(seeds) < _FEWEST else seeds[:0]


def note(seeds: Iterable[int], single: str = "Thin lines", band: str = "Bands") -> str:
    """How a figure shows seeds, given how many each variant has."""
    counts = set(seeds)
    if counts == {1}:
        return "One seed per variant."
    words = ["Lines are means over seeds."]
    if any(1 < count < _FEWEST for count in counts):
        words.append(f"{single} are single seeds.")
    if max(counts) >= _FEWEST:
        words.append(f"{band} are 95% intervals over seeds.")
    return " ".join(words)


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
