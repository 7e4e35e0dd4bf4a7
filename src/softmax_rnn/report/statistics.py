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
# A larger weight makes intervals narrower where blocks dominate. With 0.4 two seeds cover 0.938.
_BLOCKS_WEIGHT = 0.25
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

    Seeds and blocks are two crossed samples: see ``half_width``. With one seed the interval covers
    test blocks only.

    Args:
        losses: the variant's losses [seeds, blocks].
        reference: the reference's losses for the same seeds and blocks.
        confidence: confidence level of the interval.
    """
    if losses.shape != reference.shape:
        raise ValueError(f"Losses of shapes {losses.shape} and {reference.shape} cannot be paired.")
    difference = losses - reference
    mean = float(difference.mean())
    seeds, blocks = difference.shape
    over = "seeds and test blocks" if seeds > 1 else BLOCKS_ONLY
    half = float(half_width(mean_squares(difference), seeds, blocks, confidence))
    return Difference(mean, mean - half, mean + half, over)


def mean_squares(difference: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """The mean squares of seeds, of blocks and of the rest [...], of [..., seeds, blocks].

    A source with a single member has no degrees of freedom: its mean square is 0.
    """
    seeds, blocks = difference.shape[-2:]
    of_seed, of_block = difference.mean(-1, keepdims=True), difference.mean(-2, keepdims=True)
    mean = difference.mean((-2, -1), keepdims=True)
    squares = (
        blocks * (of_seed - mean) ** 2,
        seeds * (of_block - mean) ** 2,
        (difference - of_seed - of_block + mean) ** 2,
    )
    freedom = (seeds - 1, blocks - 1, (seeds - 1) * (blocks - 1))
    return tuple(
        square.sum((-2, -1)) / max(free, 1) for square, free in zip(squares, freedom, strict=True)
    )


def half_width(
    squares: Sequence[NDArray[np.float64]], seeds: int, blocks: int, confidence: float = 0.95
) -> NDArray[np.float64]:
    """Half of the confidence interval of a mean over seeds and blocks.

    The model is ``difference = mean + seed + block + rest``, with independent normal effects. Each
    mean square, divided by the number of differences, estimates a part of the variance of the mean;
    ``blocks - rest + seeds`` estimates all of it. Each part gets a t quantile with its own degrees
    of freedom, and the squares of these widths are added (Howe, 1974). With few seeds their
    quantile is so large that the sum would be too wide where blocks dominate. So the seeds' squared
    quantile is averaged with that of the blocks. The weights are the two parts' variances, that of
    the blocks times ``_BLOCKS_WEIGHT``.

    The coverage was simulated over all shares of seeds, blocks and rest. For a 95% interval it is
    0.95 to 0.97 with three seeds or more and 16 blocks or more. With two seeds it is 0.94 to 0.98,
    and with eight blocks up to 0.98: there the interval is wide if the seeds' share is small. For a
    90% interval it is 0.9 to 0.95. With two seeds a 99% interval covers only 98%. Skewed blocks
    lower it a little, as that of any t interval: eight blocks with a skewness of 1 to 0.93.

    Args:
        squares: the mean squares [...] of seeds, blocks and the rest: see ``mean_squares``.
        seeds: the number of seeds; with one, only blocks count.
        blocks: the number of blocks; with one, only seeds count.
        confidence: confidence level of the interval.

    Returns:
        [...]; infinite for one seed and one block.
    """
    if seeds == blocks == 1:
        return np.full(np.shape(squares[0]), math.inf)
    freedom = (seeds - 1, blocks - 1, (seeds - 1) * (blocks - 1))
    of_seeds, of_blocks, of_rest = (
        float(stats.t.ppf((1 + confidence) / 2, max(free, 1))) ** 2 for free in freedom
    )
    seed, block, rest = (np.asarray(square) / (seeds * blocks) for square in squares)
    # A few seeds can agree by chance: half of an interval over blocks alone is the least.
    least = of_blocks * block / 4
    # The rest is in the mean squares of seeds and of blocks: it counts once.
    block = np.maximum(block - rest * of_rest / of_blocks, 0)
    weight = _BLOCKS_WEIGHT * block
    total = seed + weight
    share = np.divide(seed, total, out=np.ones_like(total), where=total > 0)
    square = of_blocks * block + seed * (share * of_seeds + (1 - share) * of_blocks)
    return np.sqrt(np.maximum(square, least))


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
