"""Paired differences of test losses, with their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True)
class Difference:
    """A mean paired difference and its confidence interval, nats per token."""

    mean: float
    low: float
    high: float


def paired_difference(
    losses: NDArray[np.float64], reference: NDArray[np.float64], confidence: float = 0.95
) -> Difference:
    """The mean of ``losses - reference``, paired by seed and test block.

    Seeds and blocks are two crossed samples: the variance of the mean is estimated as that of the
    block means over the number of blocks plus that of the seed means over the number of seeds
    (which counts their interaction twice, on the careful side), with Satterthwaite's degrees of
    freedom. With one seed the interval speaks of that seed's two models alone.

    Args:
        losses: the variant's losses [seeds, blocks].
        reference: the reference's, of the same seeds and blocks.
        confidence: of the interval.
    """
    if losses.shape != reference.shape:
        raise ValueError(f"Losses of shapes {losses.shape} and {reference.shape} cannot be paired.")
    difference = losses - reference
    mean = float(difference.mean())
    parts = [
        (sample.var(ddof=1) / len(sample), len(sample) - 1)
        for sample in (difference.mean(axis=0), difference.mean(axis=1))
        if len(sample) > 1
    ]
    variance = float(sum(part for part, _ in parts))
    if not parts:
        return Difference(mean, -math.inf, math.inf)
    if variance == 0:
        return Difference(mean, mean, mean)
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    half = float(stats.t.ppf((1 + confidence) / 2, freedom)) * math.sqrt(variance)
    return Difference(mean, mean - half, mean + half)
