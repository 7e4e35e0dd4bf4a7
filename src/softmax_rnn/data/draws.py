"""Random draws that are pure functions of their arguments: no state to keep or to restore."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The first held-out document is among this many, so that a short corpus has a test split.
_FIRST = 20


def mix(*numbers: int | NDArray[Any]) -> NDArray[np.uint64]:
    """64 random bits for each combination of ``numbers`` (SplitMix64), broadcast, at least 1-D."""
    state = np.zeros(1, np.uint64)  # products of arrays wrap around without a warning
    for number in numbers:
        state = state + np.asarray(number).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def held_out(seed: int, fraction: float, documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each document, given by its number, belongs to the test split.

    One document is drawn from each group of ``1 / fraction`` consecutive documents: the share is
    exact, and the total number of documents need not be known.
    """
    share = Fraction(repr(fraction)).limit_denominator(10**6) or Fraction(1, 10**6)
    top, bottom = share.numerator, share.denominator
    group = documents * top // bottom
    first, end = -(-group * bottom // top), -(-(group + 1) * bottom // top)
    width = end - first
    width[group == 0] = np.minimum(width[group == 0], _FIRST)
    return documents == first + (mix(seed, group) % width.astype(np.uint64)).astype(np.int64)


def scattered(seed: int, epoch: int, place: int, count: int) -> int:
    """The value at ``place`` of a permutation of ``range(count)`` that is never stored.

    A Feistel network permutes the numbers below the smallest power of 4 that is at least ``count``.
    It is applied again while the value is too large.
    """
    half = (max(count - 1, 1).bit_length() + 1) // 2
    low = (1 << half) - 1
    value = place
    while True:
        left, right = value >> half, value & low
        for turn in range(4):
            left, right = right, left ^ (int(mix(seed, epoch, turn, right)[0]) & low)
        value = left << half | right
        if value < count:
            return value
