"""How a variant's gap to softmax changes with the tokens of training, as a power law.

The gap is the variant's test loss minus softmax's with the same seed and tokens. To each seed's
gaps after the warm-up a line is fitted in logarithms: ``gap = a * tokens**-b``. A constant is added
to the law if the gaps of all seeds together show that they level off.

Intervals are t intervals over the seeds' fitted values, for a gap in logarithms. The points of one
run depend on each other, so the regression's own interval would be far too narrow; three seeds are
too few for a bootstrap.

A gap at more tokens than were trained on is an extrapolation. It assumes that the law goes on, for
the same model. Points before the end of a run are of a training whose learning rate has not yet
decayed to zero. The final gaps of runs of several lengths have no such flaw: see ``law_of_ends``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from softmax_rnn.report.curves import MIN_SEEDS, seed_interval
from softmax_rnn.report.statistics import Difference, paired_runs
from softmax_rnn.report.table import REFERENCE, by_variant
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder

_PAPER = RunConfig.preset("small")
PAPER_TOKENS = _PAPER.steps * _PAPER.tokens_per_step

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """``gap = exp(level) * (tokens / unit)**-exponent + exp(constant)``, for each seed.

    Attributes:
        unit: tokens at which ``level`` is the logarithm of the gap without the constant.
        level: [seeds].
        exponent: [seeds]; negative if the gap grows.
        constant: [seeds]; -inf for a law without a constant.
    """

    unit: float
    level: Floats
    exponent: Floats
    constant: Floats

    @property
    def levels_off(self) -> bool:
        """Whether the law has a constant."""
        return bool(np.isfinite(self.constant).all())

    def gap(self, tokens: float | Floats) -> tuple[Floats, ...]:
        """The mean of the gap's logarithm over seeds, and its 95% interval, as gaps [...]."""
        x = np.log(np.asarray(tokens) / self.unit)
        line = self.level - np.multiply.outer(x, self.exponent)  # [..., seeds]
        logs = np.logaddexp(line, self.constant)
        return tuple(np.exp(part) for part in seed_interval(np.moveaxis(logs, -1, 0)))


def fit_law(tokens: Floats, gaps: Floats) -> Law:
    """A law for each seed, by least squares in logarithms.

    Args:
        tokens: [points], at least two.
        gaps: [seeds, points], all positive, of at least three seeds.
    """
    unit = float(np.exp(np.log(tokens).mean()))
    x, y = np.log(tokens / unit), np.log(gaps)
    slope, level = np.polyfit(x, y.T, 1)
    law = Law(unit, level, -slope, np.full(len(gaps), -math.inf))
    if len(tokens) < 4:
        return law
    _, curvature, _ = seed_interval(np.polyfit(x, y.T, 2)[0])
    if curvature <= 0:
        return law
    return Law(
        unit,
        *np.transpose([_fit_constant(x, *seed) for seed in zip(y, level, -slope, strict=True)]),
    )


def _fit_constant(x: Floats, y: Floats, level: float, exponent: float) -> Floats:
    """The level, exponent and constant of one seed; the constant is below the smallest gap."""

    def residuals(parameters: Floats) -> Floats:
        return np.logaddexp(parameters[0] - parameters[1] * x, parameters[2]) - y

    low = (-np.inf, -np.inf, y.min() - 20)  # a smaller constant is none
    high = (np.inf, np.inf, y.min())
    return least_squares(residuals, (level, exponent, y.min() - 1), bounds=(low, high)).x


@dataclass(frozen=True)
class Gap:
    """The gap of a variant to softmax.

    Attributes:
        variant: its name.
        tokens: [points], of the evaluations after the warm-up; there is at least one.
        seeds: the gap of each seed [seeds, points], in nats per token.
        final: the final gap with its interval over seeds and test blocks.
        law: the law; ``None`` if there is none.
        reason: why there is none.
    """

    variant: str
    tokens: Floats
    seeds: Floats
    final: Difference
    law: Law | None
    reason: str = ""

    @property
    def last(self) -> float:
        """The tokens of the last evaluation."""
        return float(self.tokens[-1])


def gaps(runs: Sequence[RunFolder]) -> list[Gap]:
    """The gap of each variant that shares a seed with softmax, from comparable runs."""
    grouped = by_variant(runs)
    reference = grouped.pop(REFERENCE, {})
    return [
        _gap(variant, seeds, reference, shared)
        for variant, seeds in grouped.items()
        if (shared := sorted(set(seeds) & set(reference)))
    ]


def _gap(
    variant: str,
    runs: Mapping[int, RunFolder],
    reference: Mapping[int, RunFolder],
    seeds: Sequence[int],
) -> Gap:
    mine, other = ([_after_warmup(side[seed]) for seed in seeds] for side in (runs, reference))
    tokens = np.mean([rows.tokens for rows in other], axis=0)
    pairs = zip(mine, other, strict=True)
    differences = np.stack([(a.test_loss - b.test_loss).to_numpy() for a, b in pairs])
    final = paired_runs(runs, reference, seeds)
    law, reason = _law(tokens, differences, final)
    return Gap(variant, tokens, differences, final, law, reason)


def _after_warmup(run: RunFolder) -> pd.DataFrame:
    return run.evaluations.query(f"step > {run.config.warmup}")


def _law(tokens: Floats, seeds: Floats, final: Difference) -> tuple[Law | None, str]:
    """The law, or why there is none."""
    if len(seeds) < MIN_SEEDS:
        return None, "fewer than three seeds"
    if final.low <= 0:
        return None, "the final gap is negative" if final.high < 0 else "no significant gap"
    if len(tokens) < 2:
        return None, "fewer than two evaluations after the warm-up"
    if (seeds <= 0).any():
        return None, "not positive at every evaluation"
    return fit_law(tokens, seeds), ""


def law_of_ends(found: Sequence[Sequence[RunFolder]], variant: str) -> Law | None:
    """The law through the final gaps of sets of runs of different lengths.

    The learning rate of each has decayed to zero. ``None`` unless there are two lengths and three
    seeds that all of them have, and all gaps are positive.
    """
    tokens, ends = [], []
    for runs in found:
        grouped = by_variant(runs)
        mine, other = grouped.get(variant, {}), grouped.get(REFERENCE, {})
        if shared := set(mine) & set(other):
            tokens.append(other[min(shared)].evaluations.tokens.iloc[-1])
            ends.append(
                {
                    seed: mine[seed].summary["test_loss"] - other[seed].summary["test_loss"]
                    for seed in shared
                }
            )
    if len(ends) < 2:
        return None
    seeds = set.intersection(*map(set, ends))
    final = np.array([[end[seed] for end in ends] for seed in sorted(seeds)])
    if len(seeds) < MIN_SEEDS or len(set(tokens)) < 2 or (final <= 0).any():
        return None
    return fit_law(np.array(tokens, dtype=float), final)
