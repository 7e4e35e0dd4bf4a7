"""One call in place of many: softmax by PyTorch, and a token after a state in C++.

For few tokens, calling operations takes longer than computing them. ``plan.py`` says for which
calls these are. Where a result is not certain, the general way computes it. Of a token like the one
before it, nothing is checked or planned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from softmax_rnn.ops.finite import within_range
from softmax_rnn.ops.forms.cpu import token as native_token
from softmax_rnn.ops.forms.cpu.token import Features, Inverse
from softmax_rnn.ops.forms.first_order import unreadable
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.monomials import degrees
from softmax_rnn.ops.spec import AttentionSpec, Decay, FeatureMap, Series
from softmax_rnn.ops.state import State, next_state

__all__ = [
    "Features",
    "Inverse",
    "Weights",
    "after_another",
    "after_state",
    "like_the_last",
    "softmax",
]


def softmax(call: Call) -> Tensor | None:
    """Plain softmax; ``None`` for rows that are not contiguous, which PyTorch's kernels misread."""
    q, k, v = call.q, call.k, call.v
    if q.stride(3) * k.stride(3) * v.stride(3) != 1:
        return None
    width, grouped = q.shape[3], q.shape[1] != k.shape[1]
    causal = call.causal and q.shape[2] > 1
    scale = call.spec.score_scale(width)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def after_state(call: Call) -> tuple[Tensor, State] | None:
    """The output for a token and the state after it; ``None`` if it is not certain."""
    state = call.state
    assert state is not None
    return _found(native_token.step(call), call.spec, state)


# What a token has in common with the one that made its state: what was checked of that one holds.
_ALIKE: WeakKeyDictionary[State, native_token.Alike] = WeakKeyDictionary()


def like_the_last(q: Tensor, k: Tensor, v: Tensor, state: State) -> native_token.Alike | None:
    """What a token has in common with the one before it; ``None`` if it has to be checked.

    For attentions without a decay, whose tokens have no arguments but those of
    :func:`after_another`, and without a mask.
    """
    found = None if unreadable() else _ALIKE.get(state)
    if found is None or found.spec.decay != "none":
        return None
    derivative = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if derivative or torch.is_autocast_enabled("cpu"):
        return None
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    types = q.dtype == k.dtype == v.dtype == found.dtype
    return found if types and (q.shape, k.shape, v.shape) == (found.q, found.k, found.v) else None


def after_another(
    alike: native_token.Alike,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    features: Features | None,
    outside_scale: Tensor | None,
) -> tuple[Tensor, State] | None:
    """As :func:`after_state`, of a token :func:`like_the_last`."""
    far: Any = (None, None) if features is None else features
    token = native_token.following(alike, q, k, v, state, far, outside_scale)
    return _found(token, state.spec, state)


def _found(
    token: native_token.Token | None, spec: AttentionSpec, state: State
) -> tuple[Tensor, State] | None:
    """The output and the state after a token, if powers of its numbers are in range."""
    if token is None:
        return None
    if not within_range(spec, token.largest_key, token.largest_value, 1, token.alike.dtype):
        return None
    sums = token.sums, token.magnitudes, token.largest
    after = next_state(spec, state, *sums, token.recent, token.first, None, 1)
    _ALIKE[after] = token.alike
    return token.out, after


class Weights(NamedTuple):
    """A spec that :func:`after_state` computes, as arguments of an operator."""

    series: Series
    order: int
    coefficients: Sequence[float] | None
    decay: Decay
    feature_map: FeatureMap
    scale: float

    @classmethod
    def of(cls, spec: AttentionSpec, width: int) -> Weights:
        """The operator's arguments for a spec and the width of its keys."""
        fixed = None if spec.coefficients is None else list(spec.coefficients)
        scale = float(spec.score_scale(width))
        return cls(spec.series, degrees(spec)[1], fixed, spec.decay, spec.feature_map, scale)

    @property
    def spec(self) -> AttentionSpec:
        """A spec with these weights."""
        fixed = None if self.coefficients is None else tuple(self.coefficients)
        return AttentionSpec(**{**self._asdict(), "coefficients": fixed})
