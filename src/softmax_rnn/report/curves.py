"""Loss curves out of run folders, ready to draw."""

from __future__ import annotations

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


def curves(runs: Sequence[RunFolder], split: str) -> list[Curve]:
    """One curve a variant: ``test`` (every evaluation) or ``train`` (means over windows)."""
    drawn = []
    for variant, seeds in by_variant(runs).items():
        rows = [_rows(run, split) for run in seeds.values()]
        tokens = np.mean([row.tokens for row in rows], axis=0)  # of documents each seed has its own
        drawn.append(Curve(variant, tokens, *seed_interval(np.stack([row.loss for row in rows]))))
    return drawn


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
    size = max(1, -(-len(rows) // _SMOOTHED_TO))
    rows = rows.iloc[len(rows) % size :]  # a short window at the end would make the curves jump
    window = np.arange(len(rows)) // size
    return rows.groupby(window).agg({"tokens": "last", "loss": "mean"})
