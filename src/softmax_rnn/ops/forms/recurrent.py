"""A finite series one token at a time: the query reads the state, then the key is added to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.compiler import uncompiled
from softmax_rnn.ops.forms.channels import (
    Terms,
    closer,
    from_columns,
    read_noise,
    to_columns,
)
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, in_own_precision
from softmax_rnn.ops.monomials import (
    degrees,
    monomials,
    monomials_backward,
    row_weights,
    state_rows,
)
from softmax_rnn.ops.series import PowerSeries
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
    qs, ks, vs, seen = first_order(*to_columns(q, k, v, spec, mask, state, keep_state))
    degree, series = degrees(spec)[1], PowerSeries.of(spec)
    rows = state_rows(spec, q.shape[-1])
    terms = Terms.of(spec, q.shape[-1])
    weights = row_weights(spec, q.shape[-1], qs.dtype, qs.device)
    if seen is None:
        seen = vs.new_zeros(*vs.shape[:2], rows)

    def features(columns: Tensor) -> Tensor:
        return _Monomials.apply(columns, degree)[:, -rows:]

    outs: list[Tensor] = []
    noises: list[Tensor] = []

    def read(queries: Tensor, seen: Tensor) -> None:  # of all heads that share a key
        columns = features(queries)
        outs.append(seen @ (weights.unsqueeze(-1) * columns))
        if spec.row_sum is not None and spec.cancels:
            noise = read_noise(queries.detach(), seen.detach(), terms, weights)
            found = outs[-1][:, -1].detach(), (weights * seen[:, -1]).detach(), columns.detach()
            noises.append(closer(noise, *found))

    past = k.shape[2] - q.shape[2] if causal else k.shape[2]
    for token in range(k.shape[2]):
        value, key = vs[..., token, None], ks[..., token, None]
        if token >= past:
            queries = qs[..., token - past]
            read(queries, seen)
            # Its own key by the score, exactly: the first tokens have little else.
            outs[-1] = outs[-1] + value @ series(key.mT @ queries)
        seen = torch.baddbmm(seen, value, features(key).mT)
    for token in range(0 if causal else q.shape[2]):
        read(qs[..., token], seen)
    sums = torch.stack(outs, dim=-1) if outs else vs.new_zeros(*vs.shape[:2], qs.shape[2], 0)
    noise = torch.stack(noises, dim=-1) if noises else None
    return from_columns(sums, spec, k, seen if keep_state else None, noise)


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
    @in_own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        columns, features = ctx.saved_tensors
        return monomials_backward(columns, ctx.degree, features, grad.clone()), None
