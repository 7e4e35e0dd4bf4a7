"""Paired differences of test losses, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from softmax_rnn.training.folder import RunFolder

BLOCKS_ONLY = "test blocks only"
Measure = Literal["test_losses", "test_errors"]


@dataclass(frozen=True)
class Difference:
    """A mean paired difference and its confidence interval, of losses in nats per token or shares.

    Attributes:
        mean: the mean over seeds and test blocks.
        low: the lower end of the interval.
        high: the upper end of the interval.
        over: what the interval covers: ``seeds and test blocks``, or with one seed ``test blocks
            only``. With another seed the two models may differ by more.
    """

    mean: float
    low: float
    high: float
    over: str

    def __str__(self) -> str:
        """The mean and its interval, with a note if the interval does not cover seeds."""
        if math.isinf(self.low):  # one seed and one test block
            return f"{self.mean:+.4f}"
        only = f" ({self.over})" if self.over == BLOCKS_ONLY else ""
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]{only}"


def paired_difference(
    losses: NDArray[np.float64], reference: NDArray[np.float64], confidence: float = 0.95
) -> Difference:
    """The mean of ``losses - reference``, paired by seed and test block.

    Seeds and blocks are two crossed samples. The variance of the mean is estimated as the variance
    of the block means divided by the number of blocks, plus the variance of the seed means divided
    by the number of seeds. This counts their interaction twice, so the interval is rather too wide.
    The degrees of freedom are Satterthwaite's. With one seed the interval covers test blocks only.

    Args:
        losses: the variant's losses [seeds, blocks].
        reference: the reference's losses for the same seeds and blocks.
        confidence: confidence level of the interval.
    """
    if losses.shape != reference.shape:
        raise ValueError(f"Losses of shapes {losses.shape} and {reference.shape} cannot be paired.")
    difference = losses - reference
    mean = float(difference.mean())
    over = "seeds and test blocks" if len(difference) > 1 else BLOCKS_ONLY
    parts = [
        (sample.var(ddof=1) / len(sample), len(sample) - 1)
        for sample in (difference.mean(axis=0), difference.mean(axis=1))
        if len(sample) > 1
    ]
    variance = float(sum(part for part, _ in parts))
    if not parts:
        return Difference(mean, -math.inf, math.inf, over)
    if variance == 0:
        return Difference(mean, mean, mean, over)
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    low, high = stats.t.interval(confidence, freedom, mean, math.sqrt(variance))
    return Difference(mean, float(low), float(high), over)


def paired_runs(
    runs: Mapping[int, RunFolder],
    reference: Mapping[int, RunFolder],
    seeds: Sequence[int],
    confidence: float = 0.95,
    measure: Measure = "test_losses",
) -> Difference:
    """The paired difference of two variants' final test losses or errors, on these seeds."""
    values, others = (
        np.stack([getattr(side[seed], measure) for seed in seeds]) for side in (runs, reference)
    )
    return paired_difference(values, others, confidence)
