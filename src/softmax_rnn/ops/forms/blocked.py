"""Any series, memory linear in the length: blocks of queries against their visible keys.

The sums of equations 1 to 6 (``reference.attention``), for every spec. The backward pass recomputes
the scores; only q, k, v and the row maxima are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, without_autocast
from softmax_rnn.ops.forms.weight import Weight
from softmax_rnn.ops.spec import AttentionSpec

BLOCK = 128  # queries of a block
# Scores of one step, in elements: on a CPU they should fit its cache.
_CPU_SCORES, _GPU_SCORES = 2**21, 2**27


def blocked(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, causal: bool, mask: Tensor | None
) -> RowSums:
    """As :func:`softmax_rnn.ops.forms.dense.dense`, without the T x S weights."""
    weight = Weight.from_spec(spec, q.shape[-1], causal)
    numerator, weight_sum, log_scale = _BlockedSums.apply(*first_order(q, k, v), mask, weight)
    return RowSums(numerator, weight_sum, log_scale if weight.shifted else None)


class _Step(NamedTuple):
    """Rows ``start:stop`` of the key/value heads ``heads`` against the first ``keys`` keys."""

    heads: slice
    start: int
    stop: int
    keys: int


class _Blocks:
    """q, k, v as [B*Hkv, G, T, D], [B*Hkv, S, D], [B*Hkv, S, E], and the walk over their blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weight: Weight):
        self.queries, kv_heads, self.keys = q.shape[2], k.shape[1], k.shape[2]
        self.groups = q.shape[1] // kv_heads
        self.weight, self.dtype = weight, compute_dtype(q.dtype)
        self.q = self.grouped(q)
        self.k, self.v = (x.to(self.dtype).flatten(0, 1) for x in (k, v))
        self.kv_heads, self.mask = kv_heads, mask
        if mask is not None and mask.shape[1] > 1:
            self.mask = mask.unflatten(1, (kv_heads, self.groups))
        elif mask is not None:
            self.mask = mask.unsqueeze(1)  # [B or 1, Hkv or 1, G or 1, T or 1, S or 1]
        hidden = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device)
        self.future = hidden.triu(1)

    def grouped(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B*Hkv, G, T, D]: the query heads of one key head side by side."""
        return x.unflatten(1, (-1, self.groups)).flatten(0, 1)

    def __iter__(self) -> Iterator[_Step]:
        budget = _CPU_SCORES if self.q.device.type == "cpu" else _GPU_SCORES
        for start in range(0, self.queries, BLOCK):
            stop = min(start + BLOCK, self.queries)
            keys = stop + self.keys - self.queries if self.weight.causal else self.keys
            heads = max(1, budget // (self.groups * (stop - start) * max(keys, 1)))
            for head in range(0, len(self.k), heads):
                yield _Step(slice(head, head + heads), start, stop, keys)

    def rows(self, x: Tensor, step: _Step) -> Tensor:
        """A block of query rows of ``x`` [B*Hkv, G, T, D] as [heads, G*rows, D]."""
        return x[step.heads, :, step.start : step.stop].to(self.dtype).flatten(1, 2)

    def scores(self, step: _Step) -> tuple[Tensor, Tensor]:
        """The scaled query rows and their scores with the visible keys, before clamp and mask."""
        q = self.rows(self.q, step) * self.weight.scale
        return q, q @ self.k[step.heads, : step.keys].transpose(1, 2)

    def hide(self, weights: Tensor, step: _Step, value: float) -> Tensor:
        """Fill the invisible keys of each row with ``value``, in place."""
        rows = step.stop - step.start
        grid = weights.unflatten(1, (self.groups, rows))
        if self.weight.causal:
            diagonal = grid[..., step.keys - rows :]
            diagonal.masked_fill_(self.future[:rows, :rows], value)
        if self.mask is not None:
            grid.masked_fill_(~self.block_mask(self.mask, step), value)
        return weights

    def block_mask(self, mask: Tensor, step: _Step) -> Tensor:
        """The part of the mask that a step sees, broadcastable to [heads, G, rows, keys]."""
        if mask.shape[-2] > 1:
            mask = mask[..., step.start : step.stop, :]
        if mask.shape[-1] > 1:
            mask = mask[..., : step.keys]
        flat = torch.arange(*step.heads.indices(len(self.k)), device=mask.device)
        batch = flat // self.kv_heads if mask.shape[0] > 1 else torch.zeros_like(flat)
        head = flat % self.kv_heads if mask.shape[1] > 1 else torch.zeros_like(flat)
        return mask[batch, head]


class _BlockedSums(torch.autograd.Function):
    """(q, k, v) -> (numerator, weight sum, row maximum), the last one a constant."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weight: Weight
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = _Blocks(q, k, v, mask, weight)
        numerator = q.new_empty(*blocks.q.shape[:-1], v.shape[-1], dtype=blocks.dtype)
        weight_sum = q.new_empty(blocks.q.shape[:-1], dtype=blocks.dtype)
        maximum = torch.zeros_like(weight_sum)
        for step in blocks:
            _, scores = blocks.scores(step)
            if weight.clamp is not None:
                scores.clamp_max_(weight.clamp)
            here = (step.heads, slice(None), slice(step.start, step.stop))
            if weight.shifted:
                largest = blocks.hide(scores, step, -torch.inf).amax(-1, keepdim=True)
                largest.masked_fill_(largest == -torch.inf, 0.0)
                weights = scores.sub_(largest).exp_()
                maximum[here] = largest.view_as(maximum[here])
            else:
                weights = blocks.hide(weight.series(scores), step, 0.0)
            weight_sum[here] = weights.sum(-1).view_as(weight_sum[here])
            numerator[here] = (weights @ blocks.v[step.heads, : step.keys]).view_as(numerator[here])
        ctx.save_for_backward(q, k, v, mask, maximum)
        ctx.weight = weight
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
        weight: Weight = ctx.weight
        blocks = _Blocks(q, k, v, mask, weight)
        slope = weight.series.derivative()
        inputs = (blocks.q, blocks.k, blocks.v)
        dq, dk, dv = (torch.zeros_like(x, dtype=blocks.dtype) for x in inputs)
        grad = None if grad is None else blocks.grouped(grad)
        grad_sum = None if grad_sum is None else blocks.grouped(grad_sum.unsqueeze(-1))
        for step in blocks:
            rows, scores = blocks.scores(step)
            keys = (step.heads, slice(0, step.keys))
            clamped = None
            if weight.clamp is not None:
                clamped = scores > weight.clamp
                scores.clamp_max_(weight.clamp)
            if weight.shifted:
                scores.sub_(blocks.rows(maximum.unsqueeze(-1), step))
            weights = blocks.hide(weight.series(scores), step, 0.0)
            slopes = weights if weight.series.is_exp else blocks.hide(slope(scores), step, 0.0)
            # d loss / d weight = grad . v + grad_sum
            dweights = None if grad_sum is None else blocks.rows(grad_sum, step)
            if grad is not None:
                out = blocks.rows(grad, step)
                dv[keys] += weights.transpose(1, 2) @ out
                through_values = out @ blocks.v[keys].transpose(1, 2)
                dweights = through_values if dweights is None else through_values.add_(dweights)
            if dweights is None:
                continue
            dscores = slopes * dweights
            if clamped is not None:
                dscores.masked_fill_(clamped, 0.0)
            here = (step.heads, slice(None), slice(step.start, step.stop))
            dq[here] = (dscores @ blocks.k[keys]).mul_(weight.scale).view_as(dq[here])
            dk[keys] += dscores.transpose(1, 2) @ rows
        grads = (dx.view_as(x).to(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v)))
        return (*grads, None, None)
