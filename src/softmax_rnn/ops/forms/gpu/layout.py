"""The rows of states as the Triton kernels have them (``chunk_kernels.py`` describes them)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softmax_rnn.ops.monomials import cumulative_dimension, degrees, multiplicities
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec

MAX_ORDER = 2
SIDE = 8  # channels of a block


def tiles(spec: AttentionSpec, width: int) -> tuple[int, int]:
    """Number of tiles of rows: of products, and of channels and ones."""
    first, order = degrees(spec)
    blocks = width // SIDE
    pairs = blocks * (blocks + 1) // 2 if order == MAX_ORDER else 0
    return pairs, -(-(width + 1) // SIDE**2) if first < MAX_ORDER else 0


class Layout(NamedTuple):
    """The rows of states as the kernels have them, and where their numbers are in the library's.

    Attributes:
        blocks: first channels of the two blocks of each tile of products, int32 [PAIRS, 2].
        counts: how often each row counts, [rows]; 0 for rows that hold nothing.
        factors: the coefficient of each row, that of the series times that of the scale.
        weights: counts times factors.
        sources: for each row a row of the library's.
        places: for each row of the library's a row.
        multiplicities: of the library's rows.
        coefficients: of powers 0 to 2, with the scale.
    """

    blocks: Tensor
    counts: Tensor
    factors: Tensor
    weights: Tensor
    sources: Tensor
    places: Tensor
    multiplicities: Tensor
    coefficients: tuple[float, ...]

    def from_library(self, state: Tensor) -> Tensor:
        """A state [..., rows] in the order of the kernels."""
        return state.index_select(-1, self.sources) * (self.counts > 0)

    def to_library(self, state: Tensor) -> Tensor:
        """The inverse of ``from_library``."""
        return state.index_select(-1, self.places)


# Cached: a host-to-device copy synchronises.
@functools.lru_cache(maxsize=64)
def layout(
    spec: AttentionSpec, width: int, scale: float, dtype: torch.dtype, device: torch.device
) -> Layout:
    """The layout of a spec's states, for a key width and a scale of scores."""
    first, order = degrees(spec)
    blocks = [(i, j) for j in range(0, width, SIDE) for i in range(0, j + 1, SIDE)]
    blocks = blocks if order == MAX_ORDER else []
    # Every row has a power, a library row among monomials of all degrees, and a number of times
    # that it counts.
    power, source, counts = [], [], []
    for i, j in blocks:
        left, right = np.mgrid[i : i + SIDE, j : j + SIDE].reshape(2, -1)
        low, high = np.minimum(left, right), np.maximum(left, right)
        source.append(cumulative_dimension(width, 1) + high * (high + 1) // 2 + low)
        power.append(np.full(len(low), 2))
        counts.append(np.full(len(low), 1 if i == j else 2))
    if first < MAX_ORDER:
        rows = np.arange(tiles(spec, width)[1] * SIDE**2)
        source.append(np.where(rows < width, rows + 1, 0))
        power.append(np.where(rows < width, 1, 0))
        counts.append(np.where((rows < width) | ((rows == width) & (first == 0)), 1, 0))
    powers, sources, count = (np.concatenate(x) for x in (power, source, counts))
    unused = cumulative_dimension(width, first - 1) if first else 0
    sources = np.maximum(sources - unused, 0)
    places = np.zeros(cumulative_dimension(width, order) - unused, np.int64)
    places[sources[count > 0]] = np.flatnonzero(count > 0)
    known = [float(a) for a in PowerSeries.from_spec(spec).coefficients or ()]
    coefficients = [a * scale**n for n, a in enumerate(known)] + [0.0] * (MAX_ORDER - order)
    factors = np.array(coefficients)[powers]
    with torch.inference_mode(False):

        def tensor(x: Any, dtype: torch.dtype = dtype) -> Tensor:
            return torch.tensor(np.asarray(x), dtype=dtype, device=device)

        return Layout(
            blocks=tensor(np.array(blocks).reshape(-1, 2), torch.int32),
            counts=tensor(count),
            factors=tensor(factors),
            weights=tensor(count * factors),
            sources=tensor(sources, torch.int64),
            places=tensor(places, torch.int64),
            multiplicities=tensor(multiplicities(width, order)[unused:]),
            coefficients=tuple(coefficients),
        )
