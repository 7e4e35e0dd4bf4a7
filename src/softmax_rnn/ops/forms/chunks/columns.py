"""The tensors of the chunked form: a column per token, with heads and batch in one dimension."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype
from softmax_rnn.ops.monomials import degrees
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec


class Columns(NamedTuple):
    """The inputs of a call; X is B * Hkv.

    Attributes:
        queries: scaled, [X, D, R, T].
        keys: [X, D, S].
        values: value channels [X, C, S]; with a row sum there is one more channel, of ones.
        state: [X, C, rows].
        log_decay: [X, 1, S], or [X, D, S] per channel.
        coefficients: [X, R, order + 1].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    state: Tensor | None
    log_decay: Tensor | None
    coefficients: Tensor | None

    def of(self, heads: slice) -> Columns:
        """The tensors of a slice of the heads."""
        return Columns(*(x if x is None else x[heads] for x in self))  # type: ignore[arg-type]


def to_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    state: Tensor | None,
    keep_state: bool,
    log_decay: Tensor | None,
    coefficients: Tensor | None,
    scale: float,
    by_token: bool,
) -> Columns:
    """All channels of a hidden key are zero, so that it adds nothing to any sum.

    Queries are multiplied by ``scale``. With ``by_token`` keys and values keep a row per token in
    memory, else they are contiguous.
    """
    dtype = compute_dtype(q.dtype)
    keys, channels = k.to(dtype), v.to(dtype)
    if spec.row_sum is not None:
        channels = torch.cat([channels, channels.new_ones(*v.shape[:3], 1)], dim=3)
    if mask is not None:  # not multiplied by 0: a hidden NaN would stay NaN
        hidden = ~mask.mT
        channels, keys = channels.masked_fill(hidden, 0.0), keys.masked_fill(hidden, 0.0)
    keys, channels = (x.flatten(0, 1).mT for x in (keys, channels))
    if not by_token:
        keys, channels = keys.contiguous(), channels.contiguous()
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1)).flatten(0, 1).movedim(-1, 1)
    queries = queries if scale == 1 else queries * scale
    if log_decay is not None:
        log_decay = log_decay.mT if log_decay.ndim == 4 else log_decay.unsqueeze(2)
        log_decay = log_decay.flatten(0, 1)
    if coefficients is not None:
        coefficients = coefficients.to(dtype).unflatten(0, (k.shape[1], -1))
        coefficients = coefficients.expand(k.shape[0], *coefficients.shape).flatten(0, 1)
    if state is not None:
        state = state.flatten(0, 1)
    elif not keep_state and degrees(spec)[1] > 1:  # a state stores unscaled keys
        queries, keys = _balanced(queries, keys)
    return Columns(queries, keys, channels, state, log_decay, coefficients)


def _balanced(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Scale queries and keys to equal size, with the same products.

    High powers of the larger ones could overflow. The factor is a power of two for each head, so
    that nothing is rounded.
    """
    if not (q[0].numel() and k[0].numel()):
        return q, k
    largest = [x.detach().abs().flatten(1).amax(1) for x in (q, k)]
    exponent = ((largest[0].log2() - largest[1].log2()) / 2).round()
    ratio = torch.where(exponent.isfinite(), exponent, 0.0).exp2()
    return q / ratio.view(-1, 1, 1, 1), k * ratio.view(-1, 1, 1)


def with_own_terms(sums: Tensor, spec: AttentionSpec, inputs: Columns) -> Tensor:
    """The sums [X, C, R, T] of earlier keys and the query's own key, which does not fade."""
    q, coefficients = inputs.queries, inputs.coefficients
    k, v = (x[..., x.shape[-1] - q.shape[-1] :].unsqueeze(2) for x in (inputs.keys, inputs.values))
    if coefficients is not None:
        coefficients = coefficients.unsqueeze(2)
    weights = PowerSeries.from_spec(spec, coefficients)((q * k).sum(1))
    return torch.addcmul(sums, weights.unsqueeze(1), v)


def from_columns(
    sums: Tensor, spec: AttentionSpec, k: Tensor, noise: Tensor | None, **after: Tensor | None
) -> RowSums:
    """Sums [X, C, R, T], noise [X, R, T], and what is kept ``after`` the keys as :class:`RowSums`.

    ``after`` are the state [X, C, rows] and its magnitudes [X, P, D].
    """
    sums = sums.unflatten(0, k.shape[:2]).movedim(2, -1).flatten(1, 2)
    kept = {name: x if x is None else x.unflatten(0, k.shape[:2]) for name, x in after.items()}
    if spec.row_sum is None:
        return RowSums(sums, **kept)
    noise = None if noise is None else noise.unflatten(0, k.shape[:2]).flatten(1, 2)
    numerator, weight_sum = sums.split([sums.shape[-1] - 1, 1], dim=-1)
    return RowSums(numerator, weight_sum.squeeze(-1), noise=noise, **kept)
