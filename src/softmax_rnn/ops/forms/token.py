"""One call in place of many: softmax by PyTorch, and a token after a state in C++.

For few tokens, calling operations takes longer than computing them. ``plan.py`` says for which
calls these are. Where a result is not certain, the general way computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.finite import within_range
from softmax_rnn.ops.forms.cpu import token as native_token
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.monomials import degrees
from softmax_rnn.ops.spec import AttentionSpec, Decay, FeatureMap, Series
from softmax_rnn.ops.state import State, next_state


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
    spec, state = call.spec, call.state
    assert state is not None
    token = native_token.step(call)
    if token is None:
        return None
    if not within_range(spec, token.largest_key, token.largest_value, 1, call.q.dtype):
        return None
    found = token.sums, token.magnitudes, token.largest
    return token.out, next_state(spec, state, *found, token.recent, token.first, None, 1)


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
