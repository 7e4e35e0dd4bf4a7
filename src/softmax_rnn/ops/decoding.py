"""One query on a CPU, without gradients: what decoding calls, in as few operations as possible.

For a query over few keys, or after a state, calling operations takes longer than computing them. So
the most usual attentions are one call: softmax over a key/value cache, and the quotient of a finite
series after a state. ``attention`` takes the general way for all others, and where a result is not
certain. Its checks come before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.finite import in_range
from softmax_rnn.ops.forms import native_library, native_token
from softmax_rnn.ops.forms.first_order import differentiated, transformed
from softmax_rnn.ops.forms.row_sums import no_data
from softmax_rnn.ops.monomials import degrees
from softmax_rnn.ops.spec import AttentionSpec, Decay, FeatureMap, Series
from softmax_rnn.ops.state import State, next_state


def over_keys(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor | None:
    """Plain softmax of one query over all keys; ``None`` for another attention."""
    if no_data(q) or not spec.is_softmax or transformed() or torch.is_autocast_enabled("cpu"):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    width, heads = q.shape[3], q.shape[1]
    if width != v.shape[3] or q.stride(3) * k.stride(3) != 1 or not q.numel() * k.numel():
        return None
    scale, grouped = spec.score_scale(width), bool(heads != k.shape[1])
    try:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
    except NotImplementedError:  # of a forward-mode derivative
        return None


def after_state(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, state: State, log_decay: Tensor | None
) -> tuple[Tensor, State] | None:
    """The output for a token and the state after it; ``None`` if it takes the general way."""
    if no_data(q) or transformed() or not _no_derivative(q, k, v, log_decay, state.sums):
        return None
    if not q.numel():
        return None
    token = native_token.step(q, k, v, spec, state, log_decay)
    if token is None or not in_range(spec, token.largest_key, token.largest_value, 1, q.dtype):
        return None
    found = token.sums, token.magnitudes, token.largest
    return token.out, next_state(spec, state, *found, None, None, None, 1)


def _no_derivative(*given: Tensor | None) -> bool:
    """Whether no tensor needs a derivative, and autocast is off."""
    if any(x is not None and differentiated(x) for x in given):
        return False
    return not torch.is_autocast_enabled("cpu")


class Weights(NamedTuple):
    """A spec that :func:`after_state` covers, as arguments of an operator."""

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


def in_compiled_graph(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, state: State, log_decay: Tensor | None
) -> bool:
    """Whether a compiled graph calls an operator for this token after a state.

    Compiled operations are slower than the one call, and do not check the results.
    """
    return (
        torch.compiler.is_compiling()
        and _no_derivative(q, k, v, log_decay, state.sums)
        and native_token.covers(spec, q.dtype)
        and native_library.possible()
    )
