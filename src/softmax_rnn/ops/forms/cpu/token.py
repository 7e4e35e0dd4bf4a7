"""One token after a state in C++, for a CPU: the quotient of a finite series, also with a window.

In decoding, calling operations takes longer than computing them, so everything is one call: the
keys of the window move on, the one that leaves it enters the state, and both have one denominator.
Specs with gates, norms or other denominators take the general way, and so do sums that are not
clearly right, for example within their rounding errors.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.decay import MIN_LOG_DECAY
from softmax_rnn.ops.finish import SUM_GUARD
from softmax_rnn.ops.forms.chunks.magnitudes import powers, roundings
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.monomials import cumulative_dimension, degrees, monomial_factors, row_weights
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import KeptKeys
from softmax_rnn.ops.window import parts_of

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
        recent: the keys of the window after it, if there is one; likewise ``first``.
    """

    out: Tensor
    sums: Tensor
    magnitudes: Tensor | None
    largest: Tensor | None
    largest_key: float
    largest_value: float
    recent: KeptKeys | None = None
    first: KeptKeys | None = None


# Pointers of kept keys: what they are, and those of the next state.
_KEPT = ("k", "v", "outside_k", "visible")


def _kept(name: str) -> tuple[str, ...]:
    return tuple(f"{before}{name}_{each}" for before in ("", "next_") for each in _KEPT)


class _TokenCall(ctypes.Structure):
    """``Call`` of token.cpp: pointers (0 for none) and numbers.

    ``found`` are three numbers: whether a sum is unsure, the largest key and value. The magnitudes
    [heads, powers, width] begin with the power ``first``; there are none of a state without them.
    ``roundings`` are the factors of each power in an upper bound of the noise. With a window, ``q``
    and ``k`` are those outside it, and ``near_q`` and ``near_k`` those inside.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "state", "weights", "log_decay")),
        *((name, ctypes.c_void_p) for name in ("magnitudes", "largest", "roundings")),
        *((name, ctypes.c_void_p) for name in ("parents", "factors", "out", "next", "found")),
        *((name, ctypes.c_void_p) for name in ("next_magnitudes", "next_largest")),
        *((name, ctypes.c_void_p) for name in ("near_q", "near_k", "factor")),
        *((name, ctypes.c_void_p) for name in (*_kept("recent"), *_kept("first"))),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "width", "values")),
        *((name, ctypes.c_int64) for name in ("monomials", "rows", "map", "first", "powers")),
        *((name, ctypes.c_int64) for name in ("threads", "kv_heads", "window", "first_count")),
        ("near_width", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("guard", ctypes.c_double),
        ("growth", ctypes.c_double),
        ("near_scale", ctypes.c_double),
    )


class _Constants(NamedTuple):
    tensors: dict[str, Tensor]
    numbers: dict[str, float]


def step(call: Call) -> Token | None:
    """The output for a token, or ``None`` if it is not certain.

    For the quotients of finite series that ``plan.py`` names.
    """
    spec, q, k, v, state = call.spec, call.q, call.k, call.v, call.state
    assert state is not None
    near: dict[str, Any] = {}
    if spec.window is not None:
        near = {"near_q": q.contiguous(), "near_k": k.contiguous()}
        q = q if call.outside_q is None else call.outside_q
        k = k if call.outside_k is None else call.outside_k
    constants = _constants(spec, q.shape[3], call.q.shape[3], q.dtype)
    given = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous()}
    given["state"] = state.sums.contiguous()
    if call.log_decay is not None:
        each = call.log_decay.double().clamp(MIN_LOG_DECAY, 0.0)
        each = each.reshape(-1) if call.log_decay.ndim > 1 else each.repeat(len(k))
        given["log_decay"] = each
    found, out = q.new_empty(3, dtype=torch.float64), q.new_empty(*q.shape[:3], v.shape[3])
    written = {"out": out, "next": torch.empty_like(given["state"]), "found": found}
    for name, x in (("magnitudes", state.magnitudes), ("largest", state.largest)):
        if x is not None:
            given[name] = x.contiguous()
            written[f"next_{name}"] = torch.empty_like(given[name])
    recent = first = None
    if near:
        if call.outside_scale is not None:
            near["factor"] = call.outside_scale.to(q.dtype).contiguous()
        recent = _moved("recent", state.recent, near, q.dtype)
        first = _moved("first", state.first, near, q.dtype)
    cpp.run(
        "token",
        _TokenCall,
        given | written | near | constants.tensors,
        heads=k.shape[0] * k.shape[1],
        kv_heads=k.shape[1],
        groups=q.shape[1] // k.shape[1],
        width=q.shape[3],
        values=v.shape[3],
        growth=math.sqrt(1 + int(state.tokens)),
        **constants.numbers,
    )
    unsure, key, value = found.tolist()
    others = written.get("next_magnitudes"), written.get("next_largest")
    if unsure:
        return None
    return Token(out, written["next"], *others, key, value, recent, first)


def _moved(
    name: str, kept: KeptKeys | None, tensors: dict[str, Any], dtype: torch.dtype
) -> KeptKeys | None:
    """The kept keys of the next state, to be written; ``tensors`` gets both."""
    if kept is None:
        return None
    after: dict[str, Tensor] = {}
    for field in _KEPT:
        x = getattr(kept, field)
        if x is not None:
            # Keys of autocast's type may meet a token of a wider one.
            x = x.contiguous() if field == "visible" else x.to(dtype).contiguous()
            tensors[f"{name}_{field}"] = x
            after[field] = torch.empty_like(x)
            tensors[f"next_{name}_{field}"] = after[field]
    return KeptKeys(**after)


@functools.lru_cache(maxsize=64)
def _constants(spec: AttentionSpec, width: int, near_width: int, dtype: torch.dtype) -> _Constants:
    """What does not change between tokens.

    ``width`` is that of the keys of the series, ``near_width`` that of those inside a window.
    """
    inside, series = (spec, spec) if spec.window is None else parts_of(spec, near_width, width)
    near_scale, window, firsts = inside.score_scale(near_width), spec.window, spec.global_keys
    spec = series
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
        "window": window or 0,
        "first_count": firsts,
        "near_width": near_width if window else 0,
        "near_scale": near_scale,
    }
    return _Constants(tensors, numbers)
