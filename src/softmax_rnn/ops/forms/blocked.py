"""The blocked form, for any series: blocks of queries with their visible keys.

It computes the sums of equations 1 to 6 (``reference.attention``) for every spec. Memory is linear
in the length: the backward pass recomputes the scores, and only q, k, v and the row maxima are
saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, without_autocast
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec

BLOCK = 128  # queries per block
# Scores computed in one step, in elements. On a CPU they should fit its cache.
_CPU_SCORES, _GPU_SCORES = 2**21, 2**27


def blocked(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, causal: bool, mask: Tensor | None
) -> RowSums:
    """As :func:`softmax_rnn.ops.forms.dense.dense`, without storing the T x S weights."""
    numerator, weight_sum, log_scale = _BlockedSums.apply(*first_order(q, k, v), mask, spec, causal)
    return RowSums(numerator, weight_sum, log_scale if spec.shifted else None)


class _Step(NamedTuple):
    """Query rows ``start:stop`` of the key/value heads ``heads``, and the first ``keys`` keys."""

    heads: slice
    start: int
    stop: int
    keys: int

    @property
    def rows(self) -> tuple[slice, ...]:
        """The index of the query rows in [B*Hkv, G, T]."""
        return self.heads, slice(None), slice(self.start, self.stop)


class _Blocks:
    """q, k, v as [B*Hkv, G, T, D], [B*Hkv, S, D], [B*Hkv, S, E], and the loop over their blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> None:
        self.spec, self.causal = options
        self.series = PowerSeries.from_spec(self.spec)
        self.scale, self.dtype = self.spec.score_scale(q.shape[-1]), compute_dtype(q.dtype)
        self.queries, kv_heads, self.keys = q.shape[2], k.shape[1], k.shape[2]
        self.kv_heads, self.groups = kv_heads, q.shape[1] // kv_heads
        self.q = self.grouped(q)
        self.k, self.v = (x.to(self.dtype).flatten(0, 1) for x in (k, v))
        self.mask = mask
        if mask is not None:  # [B, Hkv, G or 1, T or 1, S or 1]
            heads = (kv_heads, self.groups) if mask.shape[1] > 1 else (1, 1)
            self.mask = mask.unflatten(1, heads).expand(len(q), kv_heads, -1, -1, -1)
        self.future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu(1)

    def grouped(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B*Hkv, G, T, D]: the query heads of one key head are adjacent."""
        return x.unflatten(1, (-1, self.groups)).flatten(0, 1)

    def __iter__(self) -> Iterator[_Step]:
        budget = _CPU_SCORES if self.q.device.type == "cpu" else _GPU_SCORES
        for start in range(0, self.queries, BLOCK):
            stop = min(start + BLOCK, self.queries)
            keys = stop + self.keys - self.queries if self.causal else self.keys
            heads = max(1, budget // (self.groups * (stop - start) * max(keys, 1)))
            for head in range(0, len(self.k), heads):
                yield _Step(slice(head, head + heads), start, stop, keys)

    def rows(self, x: Tensor, step: _Step) -> Tensor:
        """A block of query rows of ``x`` [B*Hkv, G, T, D] as [heads, G*rows, D]."""
        return x[step.rows].to(self.dtype).flatten(1, 2)

    def scores(self, step: _Step) -> tuple[Tensor, Tensor]:
        """The scaled query rows and their scores with the visible keys, before clamp and mask."""
        q = self.rows(self.q, step) * self.scale
        return q, q @ self.k[step.heads, : step.keys].transpose(1, 2)

    def hide(self, weights: Tensor, step: _Step, value: float) -> Tensor:
        """Fill the invisible keys of each row with ``value``, in place."""
        rows = step.stop - step.start
        grid = weights.unflatten(1, (self.groups, rows))
        if self.causal:
            diagonal = grid[..., step.keys - rows :]
            diagonal.masked_fill_(self.future[:rows, :rows], value)
        if self.mask is not None:
            grid.masked_fill_(~self.block_mask(self.mask, step), value)
        return weights

    def block_mask(self, mask: Tensor, step: _Step) -> Tensor:
        """The part of the mask for one step, broadcastable to [heads, G, rows, keys]."""
        if mask.shape[-2] > 1:
            mask = mask[..., step.start : step.stop, :]
        if mask.shape[-1] > 1:
            mask = mask[..., : step.keys]
        heads = torch.arange(*step.heads.indices(len(self.k)), device=mask.device)
        return mask[heads // self.kv_heads, heads % self.kv_heads]


class _BlockedSums(torch.autograd.Function):
    """(q, k, v) -> (numerator, weight sum, row maximum); the maximum has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = _Blocks(q, k, v, mask, *options)
        spec, series = blocks.spec, blocks.series
        numerator = q.new_empty(*blocks.q.shape[:-1], v.shape[-1], dtype=blocks.dtype)
        weight_sum = q.new_empty(blocks.q.shape[:-1], dtype=blocks.dtype)
        maximum = torch.zeros_like(weight_sum)
        for step in blocks:
            here = step.rows
            _, scores = blocks.scores(step)
            if spec.clamp is not None:
                scores.clamp_max_(spec.clamp)
            if spec.shifted:
                largest = blocks.hide(scores, step, -torch.inf).amax(-1, keepdim=True)
                largest.masked_fill_(largest == -torch.inf, 0.0)
                weights = scores.sub_(largest).exp_()
                maximum[here] = largest.view_as(maximum[here])
            else:
                weights = blocks.hide(series(scores), step, 0.0)
            weight_sum[here] = weights.sum(-1).view_as(weight_sum[here])
            numerator[here] = (weights @ blocks.v[step.heads, : step.keys]).view_as(numerator[here])
        ctx.save_for_backward(q, k, v, mask, maximum)
        ctx.options = options
        shape = q.shape[:-1]
        maximum = maximum.view(shape)
        ctx.mark_non_differentiable(maximum)
        ctx.set_materialize_grads(False)
        return numerator.view(*shape, v.shape[-1]), weight_sum.view(shape), maximum

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, mask, maximum = ctx.saved_tensors
        blocks = _Blocks(q, k, v, mask, *ctx.options)
        spec, series, slope = blocks.spec, blocks.series, blocks.series.derivative()
        inputs = (blocks.q, blocks.k, blocks.v)
        dq, dk, dv = (torch.zeros_like(x, dtype=blocks.dtype) for x in inputs)
        if grad is None:
            grad = q.new_zeros(*q.shape[:-1], v.shape[-1])
        grad = blocks.grouped(grad)
        grad_sum = None if grad_sum is None else blocks.grouped(grad_sum.unsqueeze(-1))
        for step in blocks:
            rows, scores = blocks.scores(step)
            here, keys = step.rows, (step.heads, slice(step.keys))
            clamped = None
            if spec.clamp is not None:
                clamped = scores > spec.clamp
                scores.clamp_max_(spec.clamp)
            if spec.shifted:
                scores.sub_(blocks.rows(maximum.unsqueeze(-1), step))
            weights = blocks.hide(series(scores), step, 0.0)
            # The derivative of exp is exp itself.
            slopes = weights if slope is series else blocks.hide(slope(scores), step, 0.0)
            # d loss / d weight = grad . v + grad_sum
            out = blocks.rows(grad, step)
            dv[keys] += weights.transpose(1, 2) @ out
            dweights = out @ blocks.v[keys].transpose(1, 2)
            if grad_sum is not None:
                dweights += blocks.rows(grad_sum, step)
            dscores = slopes * dweights
            if clamped is not None:
                dscores.masked_fill_(clamped, 0.0)
            dq[here] = (dscores @ blocks.k[keys]).mul_(blocks.scale).view_as(dq[here])
            dk[keys] += dscores.transpose(1, 2) @ rows
        grads = (dx.view_as(x).to(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v)))
        return (*grads, None, None, None)
