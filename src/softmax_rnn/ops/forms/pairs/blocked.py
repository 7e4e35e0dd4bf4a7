"""The blocked form, for any series: blocks of queries with their visible keys.

It computes the sums of ``formula.attention`` for every spec. Memory is linear in the length: the
backward pass recomputes the scores, and only the inputs and the row maxima are saved. Keys that a
window hides or a decay fades to zero are skipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.decay import fade_, log_decay_grad
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.pairs.blocks import Blocks, Step
from softmax_rnn.ops.forms.row_sums import RowSums, without_autocast
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec


def blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> RowSums:
    """As :func:`softmax_rnn.ops.forms.pairs.dense.dense`, without storing the T x S weights."""
    inputs = first_order(q, k, v, log_decay, coefficients)
    numerator, weight_sum, log_scale = _BlockedSums.apply(*inputs, mask, spec, causal)
    return RowSums(numerator, weight_sum, log_scale if spec.shifted else None)


def _argument(
    blocks: Blocks, scores: Tensor, step: Step, maximum: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the series is evaluated at, the factor of its weights, and the row maximum.

    Exp takes the fading and the row maximum into its argument; then the others are ``None``. The
    scores, after the clamp, are changed in place.
    """
    fading = blocks.fading(step)
    if not blocks.spec.shifted:
        if fading is None:
            return scores, None, None
        return scores, fade_(fading), None
    if fading is not None:
        scores.add_(fading)
    blocks.hide(scores, step, -torch.inf)
    if maximum is None:
        maximum = scores.amax(-1, keepdim=True)
        maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    return scores.sub_(maximum), None, maximum


def _weighed(
    blocks: Blocks, series: PowerSeries, x: Tensor, factor: Tensor | None, step: Step
) -> Tensor:
    """The series at ``x`` times its factor; 0 for hidden keys. It may overwrite ``x``."""
    if blocks.spec.shifted:  # hidden keys are at -inf
        return fade_(x)
    weights = series(x)
    if factor is not None:
        weights.mul_(factor)
    return blocks.hide(weights, step, 0.0)


class _BlockedSums(torch.autograd.Function):
    """(q, k, v, log decay, coefficients) -> (numerator, weight sum, row maximum).

    The maximum has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        coefficients: Tensor | None,
        mask: Tensor | None,
        spec: AttentionSpec,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # By name: without gradients torch.compile counts parameters to tell whether ctx is one.
        options = spec, causal
        blocks = Blocks(q, k, v, log_decay, coefficients, mask, *options)
        numerator = q.new_empty(*blocks.q.shape[:-1], v.shape[-1], dtype=blocks.dtype)
        weight_sum = q.new_empty(blocks.q.shape[:-1], dtype=blocks.dtype)
        maximum = torch.zeros_like(weight_sum)
        for step in blocks:
            here = step.rows
            scores = blocks.scores(step)
            if blocks.spec.clamp is not None:
                scores.clamp_max_(blocks.spec.clamp)
            x, factor, largest = _argument(blocks, scores, step)
            weights = _weighed(blocks, blocks.series(step), x, factor, step)
            if largest is not None:
                maximum[here] = largest.squeeze(-1)
            weight_sum[here] = weights.sum(-1)
            values = blocks.at(blocks.v[step.heads], step)
            numerator[here] = (weights.flatten(1, 2) @ values).view_as(numerator[here])
        ctx.save_for_backward(q, k, v, log_decay, coefficients, mask, maximum)
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
        q, k, v, log_decay, coefficients, mask, maximum = ctx.saved_tensors
        blocks = Blocks(q, k, v, log_decay, coefficients, mask, *ctx.options)
        if grad is None:
            grad = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=blocks.dtype)
        grad = blocks.grouped(grad)
        grad_sum = None if grad_sum is None else blocks.grouped(grad_sum.unsqueeze(-1))
        inputs = (blocks.q, blocks.k, blocks.v)
        dq, dk, dv = (torch.zeros_like(x, dtype=blocks.dtype) for x in inputs)
        by_query = by_key = dlog_decay = None
        if blocks.total is not None:
            by_key = torch.zeros_like(blocks.total)
            by_query = torch.zeros_like(by_key[:, blocks.copies + blocks.past :])
        dcoefficients: Tensor | None = None
        if blocks.coefficients is not None:
            dcoefficients = torch.zeros_like(blocks.coefficients)
        for step in blocks:
            scores = blocks.scores(step)
            clamped: Tensor | None = None
            if blocks.spec.clamp is not None:
                clamped = scores > blocks.spec.clamp
                scores.clamp_max_(blocks.spec.clamp)
            largest = blocks.rows(maximum.unsqueeze(-1), step)
            x, factor = _argument(blocks, scores, step, largest)[:2]
            series = blocks.series(step)
            slope = series.derivative()
            weights = _weighed(blocks, series, x, factor, step)
            out = blocks.rows(grad, step).flatten(1, 2)
            blocks.add(dv, step, weights.flatten(1, 2).mT @ out)
            # d loss / d weight = grad . v + grad_sum
            dweights = (out @ blocks.at(blocks.v[step.heads], step).mT).view_as(weights)
            if grad_sum is not None:
                dweights += blocks.rows(grad_sum, step)
            # The derivative of exp is exp itself.
            slopes = weights if slope is series else _weighed(blocks, slope, x, factor, step)
            dscores = slopes.mul_(dweights)
            if by_query is not None and by_key is not None and not blocks.by_channel:
                changes = dscores if slope is series else weights.mul_(dweights)
                _add_fading(blocks, by_query, by_key, step, changes)
            if clamped is not None:
                dscores.masked_fill_(clamped, 0.0)
            dq[step.rows], dkeys = blocks.gradients(dscores, step)
            blocks.add(dk, step, dkeys)
            if dcoefficients is not None:
                if factor is not None:
                    dweights.mul_(factor)
                into = dcoefficients[step.heads]
                _add_coefficients(into, x, blocks.hide(dweights, step, 0.0))
        if by_query is not None and by_key is not None:
            if blocks.by_channel:
                by_query += (blocks.q * dq).sum(1)
                by_key += blocks.k * dk
            by_query = by_query.unflatten(0, (len(q), -1))
            dlog_decay = log_decay_grad(by_query, blocks.without_copies(by_key))
        dq = dq.view_as(q).to(q.dtype)
        dk = blocks.without_copies(dk).to(k.dtype)
        dv = blocks.without_copies(dv).to(v.dtype)
        if dcoefficients is not None:
            dcoefficients = dcoefficients.unflatten(0, (len(q), -1)).sum(0).view_as(coefficients)
            dcoefficients = dcoefficients.to(coefficients.dtype)
        return dq, dk, dv, dlog_decay, dcoefficients, None, None, None


def _add_coefficients(total: Tensor, x: Tensor, dweights: Tensor) -> None:
    """Add the gradient of the coefficients, ``sum dweights * x^n``; ``dweights`` is overwritten."""
    for n in range(total.shape[-1]):
        if n:
            dweights.mul_(x)
        total[..., n] += dweights.sum((-2, -1), keepdim=True)


def _add_fading(
    blocks: Blocks, by_query: Tensor, by_key: Tensor, step: Step, changes: Tensor
) -> None:
    """Add the gradients of ``G_t`` and ``-G_s``, from those of ``G_t - G_s`` [h, R, rows, keys]."""
    rows = step.stop - step.start
    # G_t - G_t = 0 has no gradient. As the difference of two sums it would be mostly rounding.
    own = changes[..., changes.shape[-1] - rows :].diagonal(dim1=-2, dim2=-1)
    kept = own.clone()
    own.zero_()
    by_query[step.heads, step.start : step.stop] += changes.sum(-1).sum(1)
    blocks.add(by_key, step, changes.sum((1, 2)))
    own.copy_(kept)
