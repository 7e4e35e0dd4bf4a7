"""The decays of a chunk: factors of its queries, keys and state, and the gradient of log decays.

Let ``G_t`` be the sum of a chunk's log decays up to position ``t``. The state before the chunk is
read by query ``t`` with the factor ``exp(G_t)``; key ``s`` is added to the next state with
``exp(G_end - G_s)``, beside the old state with ``exp(G_end)``; and query ``t`` reads key ``s`` with
``exp(G_t - G_s)``. A decay per token multiplies sums and values by these factors. A decay per
channel multiplies queries and keys, so that the state's monomials decay by the monomials of
``exp(G_end)``.

A query's own key does not fade. With a decay per channel the chunks leave it out, and
``with_own_terms`` adds it: its two contributions to the gradient of ``G_t``, as a query and as a
key, are large and cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.decay import fade_, log_decay_grad
from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.chunks.tables import Tables
from softmax_rnn.ops.monomials import degrees, monomials, monomials_backward
from softmax_rnn.ops.spec import AttentionSpec


class Fading(NamedTuple):
    """The factors of a chunk; ``None`` for 1.

    Attributes:
        queries: of queries that read the state, [X, D, R * L].
        keys: of keys that are added to the state, [X, D, L].
        sums: of what queries read from the state, [X, 1, R * L].
        values: of value channels that are added to the state, [X, 1, L].
        state: of the state before the chunk, [X, 1, rows] or [X, 1, 1].
        pairs: of the weights within the chunk, [X or 1, L, L]; 0 for later keys.
        total: ``G`` per channel, [X, D, L], for the scores within the chunk.
    """

    queries: Tensor | None = None
    keys: Tensor | None = None
    sums: Tensor | None = None
    values: Tensor | None = None
    state: Tensor | None = None
    pairs: Tensor | None = None
    total: Tensor | None = None


NO_FADING = Fading()


def fading(tables: Tables, log_decay: Tensor | None, groups: int) -> Fading:
    """The factors of log decays [X, 1, L], or [X, D, L] per channel."""
    if log_decay is None:
        return NO_FADING
    total, dtype = log_decay.cumsum(-1), tables.weights.dtype
    exponents = torch.cat([total, total[..., -1:] - total], dim=2)
    read, added = fade_(exponents.to(dtype)).chunk(2, dim=2)
    kept, read = read[..., -1:], read.repeat(1, 1, groups)
    if tables.channels:
        kept = monomials(kept, tables.degree)[:, tables.unused :].mT
        earlier = tables.future[: total.shape[2], : total.shape[2]].T.unsqueeze(0)
        return Fading(queries=read, keys=added, state=kept, pairs=earlier, total=total)
    pairs = fade_((total - total.mT).to(dtype)).triu_() if total.shape[2] > 1 else None
    return Fading(sums=read, values=added, state=kept, pairs=pairs)


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """``x * factor``."""
    return x if factor is None else x * factor


def decay_grad(
    spec: AttentionSpec,
    inputs: Columns,
    grads: Columns,
    sums: Tensor,
    dsums: Tensor,
    ends: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The gradient of log decays, as ``inputs.log_decay``, from the other gradients.

    ``G_t`` scales the sums of query ``t`` or the query itself, ``-G_s`` the value channels of key
    ``s`` or the key itself, and the last ``G`` the state after all keys: each monomial as often as
    the channel is a factor of it. ``ends`` are this state and its gradient.
    """
    assert inputs.log_decay is not None
    dtype = inputs.log_decay.dtype
    end = None if ends is None else (ends[0] * ends[1]).sum(1, keepdim=True, dtype=dtype)
    if spec.decay == "channel":
        by_query = (inputs.queries * grads.queries).sum(2, dtype=dtype)
        by_key = (inputs.keys * grads.keys).to(dtype)
        end = None if end is None else _by_channel(end.mT, spec, by_key.shape[1])
    else:
        by_query = (sums * dsums).sum((1, 2), dtype=dtype).unsqueeze(1)
        by_key = (inputs.values * grads.values).sum(1, keepdim=True, dtype=dtype)
        end = None if end is None else end.sum(2, keepdim=True)
    if end is not None:
        by_key[..., -1:] -= end
    return log_decay_grad(by_query, by_key)


def _by_channel(rows: Tensor, spec: AttentionSpec, width: int) -> Tensor:
    """The sum over state rows [X, rows, 1], each times the power of a channel: [X, D, 1]."""
    degree = degrees(spec)[1]
    ones = rows.new_ones(len(rows), width, 1)
    features = monomials(ones, degree)  # whose derivatives at 1 are the powers
    grad = torch.cat([torch.zeros_like(features[:, rows.shape[1] :]), rows], dim=1)
    return monomials_backward(ones, degree, features, grad)
