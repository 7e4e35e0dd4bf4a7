"""One query on a CPU, without gradients: what decoding calls, in as few operations as possible.

For a query over few keys, or after a state, calling operations takes longer than computing them. So
the most usual attentions are one call: softmax over a key/value cache, and the quotient of a finite
series after a state. ``attention`` takes the general way for all others, and where a result is not
certain. Its checks come before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.finite import in_range
from softmax_rnn.ops.forms import native_token
from softmax_rnn.ops.forms.row_sums import no_data
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State, next_state


def applies(q: Tensor, k: Tensor, v: Tensor, form: str, mask: Tensor | None) -> bool:
    """Whether these are inputs of :func:`over_keys` or :func:`after_state`."""
    if q.shape[2] != 1 or form != "auto" or mask is not None or q.device.type != "cpu":
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return not (no_data(q) or torch.is_autocast_enabled("cpu")) and q.numel() * k.numel() > 0


def over_keys(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor | None:
    """Plain softmax of one query over all keys; ``None`` for another attention."""
    if not spec.is_softmax or q.shape[3] != v.shape[3] or q.stride(3) * k.stride(3) != 1:
        return None
    scale, grouped = spec.score_scale(q.shape[3]), q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)


def after_state(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, state: State, log_decay: Tensor | None
) -> tuple[Tensor, State] | None:
    """The output for a token and the state after it; ``None`` if it takes the general way."""
    if state.sums.requires_grad and torch.is_grad_enabled():
        return None
    token = native_token.step(q, k, v, spec, state.sums, log_decay)
    if token is None or not in_range(spec, token.largest_key, token.largest_value, 1, q.dtype):
        return None
    return token.out, next_state(spec, state, token.sums, None, None, None, 1)
