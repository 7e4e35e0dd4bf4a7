"""Loss curves from run folders, ready to draw."""

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

# Two seeds are drawn as two lines: their 95% interval would be 9 times as wide as their distance.
MIN_SEEDS = 3  # for an interval
_MAX_POINTS = 40  # of a training curve, each a mean over a window
EVALUATED = {"test": "test_loss", "accuracy": "test_accuracy"}


@dataclass(frozen=True)
class Curve:
    """The loss of one variant against tokens: each seed, the mean over seeds, a 95% interval.

    Or its accuracy on a task.
    """

    variant: str
    tokens: NDArray[np.float64]
    seeds: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def has_band(self) -> bool:
        """Whether there are enough seeds for an interval."""
        return len(self.seeds) >= MIN_SEEDS

    @property
    def single(self) -> NDArray[np.float64]:
        """The seeds that are drawn as lines of their own."""
        return single_seeds(self.seeds)

    @property
    def last(self) -> float:
        """The last mean that is not NaN (a window in which no step made an update)."""
        means = self.mean[~np.isnan(self.mean)]
        return float(means[-1]) if len(means) else math.nan


def curves(runs: Sequence[RunFolder], split: str) -> list[Curve]:
    """One curve per variant: of the loss, or of the test ``accuracy``.

    ``test`` and ``accuracy`` have a point per evaluation, ``train`` is a mean over windows.
    """
    grouped = by_variant(runs).items()
    if split in EVALUATED:
        return [
            mean_curve(variant, [_evaluated(run, split) for run in seeds.values()])
            for variant, seeds in grouped
        ]
    logged = {variant: [run.metrics for run in seeds.values()] for variant, seeds in grouped}
    longest = max(len(rows) for seeds in logged.values() for rows in seeds)
    size = math.ceil(longest / _MAX_POINTS)
    return [train_curve(variant, seeds, size) for variant, seeds in logged.items()]


def train_curve(variant: str, seeds: Sequence[pd.DataFrame], size: int) -> Curve:
    """The curve of training rows, each point the mean of a window of ``size`` rows."""
    longest = max(map(len, seeds))
    return mean_curve(variant, [windows(rows, size, longest) for rows in seeds])


def mean_curve(variant: str, seeds: Sequence[pd.DataFrame]) -> Curve:
    """The curve of a variant, from the tokens and losses of each seed."""
    # A run that ended early keeps its last value. With one document per row, seeds see different
    # numbers of tokens.
    longest = max(seeds, key=len)
    same = [points.loss.reindex(longest.index, method="ffill") for points in seeds]
    tokens = np.mean([points.tokens for points in seeds if len(points) == len(longest)], axis=0)
    losses = np.stack(same)
    return Curve(variant, tokens, losses, *seed_interval(losses))


def seed_interval(losses: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Mean over seeds (first axis), and its 95% interval; with fewer than three seeds, the mean."""
    mean = losses.mean(axis=0)
    if len(losses) < MIN_SEEDS:
        return mean, mean, mean
    half = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses, axis=0)
    return mean, mean - half, mean + half


def single_seeds(seeds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The seeds (first axis) to draw one by one: all, if too few for an interval; none of one."""
    return seeds if 1 < len(seeds) < MIN_SEEDS else seeds[:0]


def note(
    seeds: Iterable[int], single: str = "Thin lines", band: str = "Bands", levels: bool = False
) -> str:
    """How a figure shows seeds, given the number of seeds of each variant.

    ``levels`` is for curves of a single evaluation, which are drawn as horizontal lines.
    """
    counts = set(seeds)
    words = ["A horizontal line is the value of a single evaluation."] if levels else []
    if counts == {1}:
        return " ".join([*words, "One seed per variant."])
    words.append("Lines are means over seeds.")
    if any(1 < count < MIN_SEEDS for count in counts):
        words.append(f"{single} are single seeds.")
    if max(counts) >= MIN_SEEDS:
        words.append(f"{band} are 95% intervals over seeds.")
    return " ".join(words)


def _evaluated(run: RunFolder, split: str) -> pd.DataFrame:
    """The tokens and losses (or accuracies) of a run's evaluations."""
    return run.evaluations.rename(columns={EVALUATED[split]: "loss"})


def windows(rows: pd.DataFrame, size: int, longest: int) -> pd.DataFrame:
    """Means over windows of ``size`` training rows.

    A run of ``longest`` rows loses an incomplete first window: at its end it would be too noisy. A
    run that ended earlier has the same windows, and loses an incomplete last one, if not its only.
    """
    rows = rows.iloc[longest % size if len(rows) > longest % size else 0 :]
    rows = rows.iloc[: max(1, len(rows) // size) * size]
    window = np.arange(len(rows)) // size
    return rows.groupby(window).agg({"tokens": "last", "loss": "mean"})
