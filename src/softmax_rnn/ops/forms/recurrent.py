"""A finite series one token at a time: the query reads the state, then the key is added to it.

Computes section 3.1's recurrence (``reference.power_rnn``) as it is written, all powers stacked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.compiler import uncompiled
from softmax_rnn.ops.forms.channels import from_columns, noise_bound, tightened, to_columns
from softmax_rnn.ops.forms.chunk_step import make_tables
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, without_autocast
from softmax_rnn.ops.monomials import monomials, monomials_backward
from softmax_rnn.ops.spec import AttentionSpec


@uncompiled  # a loop over tokens: its graph would be as long as the sequence
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool,
    mask: Tensor | None,
    state: Tensor | None = None,
    keep_state: bool = False,
) -> RowSums:
    """As :func:`softmax_rnn.ops.forms.chunked.chunked`, holding nothing but the state."""
    qs, ks, vs, state = first_order(*to_columns(q, k, v, spec, mask, state, keep_state))
    series, _, terms, degree, unused, weights, *_ = make_tables(
        spec, q.shape[-1], 1, qs.dtype, qs.device, False
    )
    if state is None:
        state = vs.new_zeros(*vs.shape[:2], len(weights))
    outs: list[Tensor] = []
    noises: list[Tensor] = []

    def features(columns: Tensor) -> Tensor:
        return _Monomials.apply(columns, degree)[:, unused:]

    def read(queries: Tensor, state: Tensor) -> None:  # of all heads that share a key
        columns = features(queries)
        outs.append(state @ (weights.unsqueeze(-1) * columns))
        if spec.row_sum is not None and spec.terms_can_cancel:
            queries, state, columns = queries.detach(), state.detach(), columns.detach()
            noise = noise_bound(queries, state, terms, weights)
            weight_sum = outs[-1][:, -1].detach()
            noises.append(tightened(noise, weight_sum, weights * state[:, -1], columns))

    earlier = k.shape[2] - q.shape[2] if causal else k.shape[2]
    for token in range(k.shape[2]):
        value, key = vs[..., token, None], ks[..., token, None]
        if token >= earlier:
            queries = qs[..., token - earlier]
            read(queries, state)
            # Its own key by the score, exactly: the first tokens see little else.
            outs[-1] = outs[-1] + value @ series(key.mT @ queries)
        state = torch.baddbmm(state, value, features(key).mT)
    for token in range(0 if causal else q.shape[2]):
        read(qs[..., token], state)
    sums = torch.stack(outs, dim=-1) if outs else vs.new_zeros(*vs.shape[:2], qs.shape[2], 0)
    noise = torch.stack(noises, dim=-1) if noises else None
    return from_columns(sums, spec, k, state if keep_state else None, noise)


class _Monomials(torch.autograd.Function):
    """``monomials`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, degree: int) -> Tensor:
        features = monomials(columns, degree)
        ctx.save_for_backward(columns, features)
        ctx.degree = degree
        return features

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        columns, features = ctx.saved_tensors
        return monomials_backward(columns, ctx.degree, features, grad.clone()), None
