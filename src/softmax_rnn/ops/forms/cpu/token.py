"""One token after a state in C++, for a CPU: the quotient of a finite series, also with a window.

In decoding, calling operations takes longer than computing them, so everything is one call: the
keys of the window move on, the one that leaves it enters the state, and both have one denominator.
A layer's features of queries and keys are made there, too.
Specs with gates, norms or other denominators take the general way, and so do sums that are not
clearly right, for example within their rounding errors.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
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
from softmax_rnn.ops.state import KeptKeys, State
from softmax_rnn.ops.window import parts_of

MAPS = {"identity": 0, "elu1": 1, "relu": 2}
FEATURES = {"squared_relu": 1, "hedgehog": 2}  # the layers' maps that C++ computes


Inverse = tuple[Tensor, Tensor, Tensor]


class Features(NamedTuple):
    """What makes queries and keys outside a window of those inside it.

    Attributes:
        kind: a key of ``FEATURES``.
        matrices: of queries [H, N, D] and keys [Hkv, N, D].
        shifts: [H, N] and [Hkv, N], or none.
        scale: of the products with a matrix.
        factor: of the queries that are made.
        inverse: of the rotation of queries and keys, which is taken off first: for each channel d
            ``x_d own_d + x_places(d) other_d``, with ``own`` and ``other`` [B or 1, 1, 1, D].
    """

    kind: str
    matrices: tuple[Tensor, Tensor]
    shifts: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    factor: float = 1.0
    inverse: Inverse | None = None

    def suit(self, dtype: torch.dtype) -> bool:
        """Whether C++ can read the matrices and shifts, beside queries of this type."""
        for x in self.matrices if self.shifts is None else (*self.matrices, *self.shifts):
            if x.dtype != dtype or not (x.is_cpu and x.is_contiguous()):
                return False
        return True


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
        alike: what the next token has in common with it.
    """

    out: Tensor
    sums: Tensor
    magnitudes: Tensor | None
    largest: Tensor | None
    largest_key: float
    largest_value: float
    recent: KeptKeys | None
    first: KeptKeys | None
    alike: Alike


# Pointers of kept keys: what they are, and those of the next state.
_KEPT = ("k", "v", "outside_k", "visible")


def _kept(name: str) -> tuple[str, ...]:
    return tuple(f"{before}{name}_{each}" for before in ("", "next_") for each in _KEPT)


class _TokenCall(ctypes.Structure):
    """``Call`` of token.cpp: pointers (0 for none) and numbers.

    The magnitudes [heads, powers, width] begin with the power ``first``; there are none of a state
    without them. ``roundings`` are the factors of each power in an upper bound of the noise. With a
    window, ``q`` and ``k`` are those outside it, and ``near_q`` and ``near_k`` those inside.
    ``made`` says how the first are made of the second, and ``angles`` is the distance of the rows'
    rotations. ``unsure`` and what follows it are results: whether a sum is not certain, whether
    all kept keys are visible from now on, the largest numbers of the mapped keys and the values.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "state", "weights", "log_decay")),
        *((name, ctypes.c_void_p) for name in ("magnitudes", "largest", "roundings")),
        *((name, ctypes.c_void_p) for name in ("parents", "factors", "out", "next")),
        *((name, ctypes.c_void_p) for name in ("next_magnitudes", "next_largest")),
        *((name, ctypes.c_void_p) for name in ("near_q", "near_k", "factor")),
        *((name, ctypes.c_void_p) for name in (*_kept("recent"), *_kept("first"))),
        *((name, ctypes.c_void_p) for name in ("own", "other", "q_matrix", "q_shift")),
        *((name, ctypes.c_void_p) for name in ("k_matrix", "k_shift", "places")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "width", "values")),
        *((name, ctypes.c_int64) for name in ("monomials", "rows", "map", "first", "powers")),
        *((name, ctypes.c_int64) for name in ("threads", "kv_heads", "window", "first_count")),
        *((name, ctypes.c_int64) for name in ("near_width", "made", "angles")),
        *((name, ctypes.c_double) for name in ("scale", "guard", "growth", "near_scale")),
        ("map_scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("unsure", "settled")),
        *((name, ctypes.c_double) for name in ("largest_key", "largest_value")),
    )


class Alike(NamedTuple):
    """What tokens one after the other have in common.

    Attributes:
        spec: the attention.
        q: the shape of the queries.
        k: that of the keys.
        v: that of the values.
        dtype: that of all of them.
        outside: the width of queries and keys outside the window; ``None`` if they are the same.
        constants: the arguments of C++ that do not change.
        tensors: those to which they point.
        function: of the library.
        settled: whether all kept keys are visible, so that of the first ones none changes.
    """

    spec: AttentionSpec
    q: torch.Size
    k: torch.Size
    v: torch.Size
    dtype: torch.dtype
    outside: int | None
    constants: _TokenCall
    tensors: dict[str, Tensor]
    function: Callable[..., Any]
    settled: bool = False


def step(call: Call) -> Token | None:
    """The output for a token, or ``None`` if it is not certain.

    For the quotients of finite series that ``plan.py`` names.
    """
    q, k, v, state = call.q, call.k, call.v, call.state
    assert state is not None
    outside = None if call.outside_q is None else call.outside_q.shape[3]
    if call.outside_q is None and call.outside_k is not None:
        outside = call.outside_k.shape[3]
    alike = _alike(call.spec, q.shape, k.shape, v.shape, q.dtype, outside)
    far = call.outside_q, call.outside_k
    return following(alike, q, k, v, state, far, call.outside_scale, call.log_decay)


def following(
    alike: Alike,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    far: tuple[Tensor | None, Tensor | None] | Features,
    outside_scale: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Token | None:
    """The output for a token like another one, or ``None`` if it is not certain.

    ``far`` are the queries and keys outside a window, where they are others than those inside, or
    what makes them.
    """
    spec, dtype = alike.spec, alike.dtype
    call = _TokenCall.from_buffer_copy(alike.constants)
    near_q, near_k = q.contiguous().resolve_neg(), k.contiguous().resolve_neg()
    v, sums = v.contiguous().resolve_neg(), state.sums.contiguous()
    held: list[Tensor] = []  # whose memory C++ reads
    if spec.window is not None:
        call.near_q, call.near_k = near_q.data_ptr(), near_k.data_ptr()
        if isinstance(far, Features):
            _make(call, far, alike)
        else:
            held += [
                near if x is None else x.contiguous().resolve_neg()
                for x, near in zip(far, (near_q, near_k), strict=True)
            ]
            call.q, call.k = held[0].data_ptr(), held[1].data_ptr()
        if outside_scale is not None:
            held.append(outside_scale.to(dtype).contiguous())
            call.factor = held[-1].data_ptr()
    else:
        call.q, call.k = near_q.data_ptr(), near_k.data_ptr()
    if log_decay is not None:
        each = log_decay.double().clamp(MIN_LOG_DECAY, 0.0).resolve_neg()
        held.append(each.reshape(-1) if log_decay.ndim > 1 else each.repeat(len(k)))
        call.log_decay = held[-1].data_ptr()
    out, next_sums = q.new_empty(*alike.q[:3], alike.v[3]), torch.empty_like(sums)
    call.v, call.out = v.data_ptr(), out.data_ptr()
    call.state, call.next = sums.data_ptr(), next_sums.data_ptr()
    magnitudes = largest = None
    if state.magnitudes is not None and state.largest is not None:
        held += [state.magnitudes.contiguous(), state.largest.contiguous()]
        call.magnitudes, call.largest = held[-2].data_ptr(), held[-1].data_ptr()
        magnitudes, largest = torch.empty_like(held[-2]), torch.empty_like(held[-1])
        call.next_magnitudes, call.next_largest = magnitudes.data_ptr(), largest.data_ptr()
    recent, first = state.recent, state.first
    if recent is not None:
        recent = _moved("recent", recent, call, alike, held)
    if first is not None and not alike.settled:
        first = _moved("first", first, call, alike, held)
    elif first is not None:
        call.first_k, call.first_v = first.k.data_ptr(), first.v.data_ptr()
        call.first_visible = first.visible.data_ptr()
    call.growth, call.threads = math.sqrt(1 + int(state.tokens)), torch.get_num_threads()
    alike.function(ctypes.byref(call))
    if call.unsure:
        return None
    if alike.settled != bool(call.settled):
        alike = alike._replace(settled=bool(call.settled))
    noise, found = (magnitudes, largest), (call.largest_key, call.largest_value)
    return Token(out, next_sums, *noise, *found, recent, first, alike)


def _make(call: _TokenCall, features: Features, alike: Alike) -> None:
    """Fill in what makes the queries and keys outside the window."""
    (q_matrix, k_matrix), shifts = features.matrices, features.shifts
    call.q_matrix, call.k_matrix = q_matrix.data_ptr(), k_matrix.data_ptr()
    if shifts is not None:
        call.q_shift, call.k_shift = shifts[0].data_ptr(), shifts[1].data_ptr()
    if features.inverse is not None:
        own, other, places = features.inverse
        call.own, call.other, call.places = own.data_ptr(), other.data_ptr(), places.data_ptr()
        call.angles = own.shape[3] if own.shape[0] > 1 else 0
    call.made, call.map_scale = FEATURES[features.kind], features.scale
    call.scale *= features.factor


def _moved(
    name: str, kept: KeptKeys, call: _TokenCall, alike: Alike, held: list[Tensor]
) -> KeptKeys:
    """The kept keys of the next state, to be written."""
    after: dict[str, Tensor] = {}
    for field in _KEPT:
        x = getattr(kept, field)
        if x is None:
            continue
        # Keys of autocast's type may meet a token of a wider one.
        x = x.contiguous() if field == "visible" else x.to(alike.dtype).contiguous()
        setattr(call, f"{name}_{field}", x.data_ptr())
        held.append(x)
        if alike.settled and field == "visible":
            after[field] = x
            continue
        after[field] = torch.empty_like(x)
        setattr(call, f"next_{name}_{field}", after[field].data_ptr())
    return KeptKeys(**after)


@functools.lru_cache(maxsize=64)
def _alike(
    spec: AttentionSpec,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtype: torch.dtype,
    outside: int | None,
) -> Alike:
    """What does not change between tokens of these sizes."""
    near_width, width = q[3], q[3] if outside is None else outside
    inside, series = (spec, spec) if spec.window is None else parts_of(spec, near_width, width)
    weights = row_weights(series, width, dtype)
    parents, factors = monomial_factors(width, degrees(series)[1])
    tensors = {"parents": torch.from_numpy(parents), "factors": torch.from_numpy(factors)}
    counts = powers(series) if series.sums_can_cancel else range(0)
    each = torch.tensor(roundings(series, dtype), dtype=torch.float64, device="cpu")
    tensors |= {"weights": weights, "roundings": each}
    window = spec.window or 0
    constants = _TokenCall(
        **{name: x.data_ptr() for name, x in tensors.items()},
        heads=k[0] * k[1],
        kv_heads=k[1],
        groups=q[1] // k[1],
        width=width,
        values=v[3],
        monomials=cumulative_dimension(width, degrees(series)[1]),
        rows=len(weights),
        map=MAPS[series.feature_map],
        first=counts.start,
        powers=len(counts),
        scale=series.score_scale(width),
        guard=SUM_GUARD,
        window=window,
        first_count=spec.global_keys,
        near_width=near_width if window else 0,
        near_scale=inside.score_scale(near_width),
    )
    function = cpp.load()[f"token_{str(dtype).removeprefix('torch.')}"]
    return Alike(spec, q, k, v, dtype, outside, constants, tensors, function)
