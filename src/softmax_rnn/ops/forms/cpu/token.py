"""One token after a state in C++, for a CPU: the quotient of a finite series.

In decoding, calling operations takes longer than computing them, so everything is one call. Specs
with gates, norms, windows or other denominators take the general way, and so do sums that are not
clearly right, for example within their rounding errors.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.decay import MIN_LOG_DECAY
from softmax_rnn.ops.finish import SUM_GUARD
from softmax_rnn.ops.forms.chunks.magnitudes import powers, roundings
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.monomials import cumulative_dimension, degrees, monomial_factors, row_weights
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State

MAPS = {"identity": 0, "elu1": 1, "relu": 2}


class Token(NamedTuple):
    """The result for a token.

    Attributes:
        out: [B, H, 1, E].
        sums: those of the state after it, [B, Hkv, E + 1, rows].
        magnitudes: those of the state after it, [B, Hkv, P, D], if it has any.
        largest: the largest value up to it, [B, Hkv], beside magnitudes.
        largest_key: the largest number of the mapped keys.
        largest_value: that of the values.
    """

    out: Tensor
    sums: Tensor
    magnitudes: Tensor | None
    largest: Tensor | None
    largest_key: float
    largest_value: float


class _TokenCall(ctypes.Structure):
    """``Call`` of token.cpp: pointers (0 for none) and numbers.

    ``found`` are three numbers: whether a sum is unsure, the largest key and value. The magnitudes
    [heads, powers, width] begin with the power ``first``; there are none of a state without them.
    ``roundings`` are the factors of each power in an upper bound of the noise.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "state", "weights", "log_decay")),
        *((name, ctypes.c_void_p) for name in ("magnitudes", "largest", "roundings")),
        *((name, ctypes.c_void_p) for name in ("parents", "factors", "out", "next", "found")),
        *((name, ctypes.c_void_p) for name in ("next_magnitudes", "next_largest")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "width", "values")),
        *((name, ctypes.c_int64) for name in ("monomials", "rows", "map", "first", "powers")),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("guard", ctypes.c_double),
        ("growth", ctypes.c_double),
    )


class _Constants(NamedTuple):
    tensors: dict[str, Tensor]
    numbers: dict[str, float]


def step(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, state: State, log_decay: Tensor | None
) -> Token | None:
    """The output for a token, or ``None`` if it is not certain.

    For the quotients of finite series that ``plan.py`` names.
    """
    constants = _constants(spec, q.shape[3], q.dtype)
    given = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous()}
    given["state"] = state.sums.contiguous()
    if log_decay is not None:
        each = log_decay.double().clamp(MIN_LOG_DECAY, 0.0)
        given["log_decay"] = each.reshape(-1) if log_decay.ndim > 1 else each.repeat(len(k))
    found, out = q.new_empty(3, dtype=torch.float64), q.new_empty(*q.shape[:3], v.shape[3])
    written = {"out": out, "next": torch.empty_like(given["state"]), "found": found}
    for name, x in (("magnitudes", state.magnitudes), ("largest", state.largest)):
        if x is not None:
            given[name] = x.contiguous()
            written[f"next_{name}"] = torch.empty_like(given[name])
    cpp.run(
        "token",
        _TokenCall,
        given | written | constants.tensors,
        heads=k.shape[0] * k.shape[1],
        groups=q.shape[1] // k.shape[1],
        width=q.shape[3],
        values=v.shape[3],
        growth=math.sqrt(1 + int(state.tokens)),
        **constants.numbers,
    )
    unsure, key, value = found.tolist()
    others = written.get("next_magnitudes"), written.get("next_largest")
    return None if unsure else Token(out, written["next"], *others, key, value)


@functools.lru_cache(maxsize=64)
def _constants(spec: AttentionSpec, width: int, dtype: torch.dtype) -> _Constants:
    """What does not change between tokens."""
    weights = row_weights(spec, width, dtype)
    parents, factors = monomial_factors(width, degrees(spec)[1])
    tensors = {"parents": torch.from_numpy(parents), "factors": torch.from_numpy(factors)}
    counts = powers(spec) if spec.sums_can_cancel else range(0)
    each = torch.tensor(roundings(spec, dtype), dtype=torch.float64, device="cpu")
    tensors |= {"weights": weights, "roundings": each}
    numbers = {
        "monomials": cumulative_dimension(width, degrees(spec)[1]),
        "rows": len(weights),
        "map": MAPS[spec.feature_map],
        "first": counts.start,
        "powers": len(counts),
        "scale": spec.score_scale(width),
        "guard": SUM_GUARD,
    }
    return _Constants(tensors, numbers)
