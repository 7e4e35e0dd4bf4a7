"""Constants of the chunked form: what the chunks of a call share."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softmax_rnn.ops.monomials import (
    cumulative_dimension,
    degrees,
    dimension,
    row_weights,
)
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec


class Tables(NamedTuple):
    """Constants that all chunks of a call share.

    With learned coefficients, series and weights are those of coefficients of one.
    """

    series: PowerSeries
    channels: bool  # whether channels of scores decay, rather than weights
    first: int  # the lowest power
    degree: int  # the highest
    unused: int  # rows of lower degrees, which `power` builds but does not keep in the state
    weights: Tensor
    powers: Tensor  # the power of each row of the state, counted from the lowest
    future: Tensor


# Cached: a host-to-device copy synchronises.
@functools.lru_cache(maxsize=64)
def make_tables(
    spec: AttentionSpec,
    width: int,
    chunk: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tables:
    """The tables of a spec, for a key width and a chunk length."""
    series, (first, degree) = PowerSeries.known_part(spec), degrees(spec)
    sizes = [dimension(width, n) for n in range(first, degree + 1)]
    with torch.inference_mode(False):
        weights = row_weights(spec, width, dtype, device)
        return Tables(
            series,
            spec.decay == "channel",
            first,
            degree,
            cumulative_dimension(width, degree) - len(weights),
            weights,
            torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device),
            torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril(-1),
        )
