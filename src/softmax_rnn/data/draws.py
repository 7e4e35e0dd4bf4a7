"""Draws that are pure functions of their numbers, so that nothing need be counted or remembered."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The first document held out is one of these, so that a short corpus has a test split as well.
_SOON = 20


def mix(*numbers: int | NDArray[Any]) -> NDArray[np.uint64]:
    """64 random bits for every combination of ``numbers`` (SplitMix64), broadcast, at least 1-D."""
    state = np.zeros(1, np.uint64)  # an array: its products wrap around without a warning
    for number in numbers:
        state = state + np.asarray(number).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def with_replacement(seed: int, positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """For every position one of ``count`` things."""
    return (mix(seed, positions) % np.uint64(count)).astype(np.int64)


def held_out(seed: int, fraction: float, documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each document, by its number, goes to the test split.

    One is drawn out of every ``1 / fraction`` that follow each other: the share is exact, and
    neither the number of documents nor any other document need be known.
    """
    share = Fraction(repr(fraction)).limit_denominator(10**6) or Fraction(1, 10**6)
    top, bottom = share.numerator, share.denominator
    group = documents * top // bottom
    first, end = -(-group * bottom // top), -(-(group + 1) * bottom // top)
    width = end - first
    width[group == 0] = np.minimum(width[group == 0], _SOON)
    return documents == first + (mix(seed, group) % width.astype(np.uint64)).astype(np.int64)


def scattered(seed: int, epoch: int, place: int, count: int) -> int:
    """The value at ``place`` of a permutation of ``range(count)`` that is written down nowhere.

    A Feistel network on the smallest power of 4 that holds ``count``, walked until inside it.
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
