"""A finite series in time linear in the length: states between chunks, scores within them.

A chunk of keys adds its monomials times its values to the state (section 3.1: one state a power,
here stacked); a chunk of queries reads the state of all earlier keys with its monomials and meets
the keys of its own chunk by their scores. The sum of weights is one more value channel, of ones.
The backward pass walks the chunks in reverse and recomputes their monomials; it keeps one state a
chunk.

Everything stands in columns (a token is one), so that a product with the many rows of monomials
has its short side, the value channels, first: matrix products are several times faster that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softmax_rnn.cost import chunk_length, heads_together
from softmax_rnn.forms.channels import from_columns, read_noise, to_columns, uncompiled
from softmax_rnn.forms.row_sums import RowSums, in_own_precision
from softmax_rnn.series import PowerSeries
from softmax_rnn.spec import AttentionSpec
from softmax_rnn.symmetric import (
    cumulative_dimension,
    degrees,
    monomials,
    monomials_backward,
    row_weights,
    state_rows,
)


class _Plan(NamedTuple):
    """What both passes need to know besides the tensors."""

    spec: AttentionSpec
    causal: bool
    chunk: int
    keep_state: bool
    differentiable: bool


@uncompiled
def chunked(
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
    """As :func:`softmax_rnn.forms.dense.dense`, after the keys that ``state`` has seen.

    Args:
        q: feature-mapped queries [B, H, T, D].
        k: feature-mapped keys [B, Hkv, S, D].
        v: values [B, Hkv, S, E].
        spec: a finite series without a clamp.
        causal: whether query ``t`` sees keys up to ``t + S - T`` only.
        mask: boolean, True = visible, per key: broadcastable to [B, Hkv, 1, S].
        state: sums over earlier keys, [B, Hkv, E + 1, rows], or E without a row sum; ``None``
            for none.
        keep_state: whether to return the state after the last key.
    """
    qs, ks, vs, before = to_columns(q, k, v, spec, mask, state, keep_state)
    inputs = (qs, ks, vs) if before is None else (qs, ks, vs, before)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    heads = max(1, k.shape[0] * k.shape[1])
    sizes = (spec, q.shape[2], k.shape[2], k.shape[3], v.shape[3])
    chunk = chunk_length(*sizes, heads=heads, groups=q.shape[1] // k.shape[1])
    plan = _Plan(spec, causal, chunk, keep_state, differentiable)
    outs, states, noises = [], [], []
    for some in _head_groups(qs, plan):
        part = None if before is None else before[some]
        out, after, noise = _ChunkedSums.apply(qs[some], ks[some], vs[some], part, plan)
        outs.append(out)
        states.append(after)
        noises.append(noise)
    after = torch.cat(states) if keep_state else None
    noise = torch.cat(noises) if spec.row_sum is not None else None
    return from_columns(torch.cat(outs), spec, k, after, noise)


def _head_groups(q: Tensor, plan: _Plan) -> Iterator[slice]:
    """Slices of the key/value heads whose monomials fit the cache together."""
    heads = heads_together(plan.spec, q.shape[1], plan.chunk, q.shape[2], q.device.type)
    for start in range(0, max(len(q), 1), heads):
        yield slice(start, start + heads)


def _slices(start: int, stop: int, length: int) -> list[slice]:
    """``start:stop`` in pieces of ``length``, the last one shorter."""
    return [slice(i, min(i + length, stop)) for i in range(start, stop, length)]


class _Chunks:
    """What a chunk is made of: columns of queries and keys, their monomials, their scores."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> None:
        self.q, self.k, self.v = q, k, v  # [N, D, G, T], [N, D, S], [N, C, S]
        width = q.shape[1]
        self.past = k.shape[2] - q.shape[3]  # keys before the first query
        self.degree = degrees(plan.spec)[1]
        # Monomials of lower degrees, which the single power of `power` only passes through.
        self.unused = cumulative_dimension(width, self.degree) - state_rows(plan.spec, width)
        self.series = PowerSeries.of(plan.spec)
        self.weights = row_weights(plan.spec, width, q.dtype, q.device)
        self.future = torch.ones(plan.chunk, plan.chunk, dtype=torch.bool, device=q.device).tril(-1)

    def no_state(self) -> Tensor:
        """The state before the first key, [N, C, rows]."""
        return self.v.new_zeros(*self.v.shape[:2], len(self.weights))

    def queries(self, where: slice, x: Tensor | None = None) -> Tensor:
        """Columns of the queries, or of ``x`` like them, heads side by side: [N, D, G * L]."""
        return (self.q if x is None else x)[..., where].flatten(2)

    def place(self, columns: Tensor, out: Tensor, where: slice) -> None:
        """The inverse of ``queries``: write columns to their places in ``out``."""
        out[..., where] = columns.unflatten(2, (out.shape[2], -1))

    def features(self, *columns: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All monomials of the columns, built together, and for each those with state rows."""
        joined = columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)
        every = monomials(joined, self.degree)
        return every, every[:, self.unused :].split([x.shape[2] for x in columns], dim=2)

    def columns_grad(
        self, columns: list[Tensor], every: Tensor, grad: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of columns, given that of their monomials with state rows."""
        if self.unused:
            grad = torch.cat([grad.new_zeros(len(grad), self.unused, grad.shape[2]), grad], dim=1)
        joined = monomials_backward(torch.cat(columns, dim=2), self.degree, every, grad)
        return joined.split([x.shape[2] for x in columns], dim=2)

    def hide_future(self, weights: Tensor) -> Tensor:
        """Zero the weights of later keys of the same chunk [N, L, G * L], in place."""
        size = weights.shape[1]
        weights.unflatten(2, (-1, size)).masked_fill_(self.future[:size, None, :size], 0.0)
        return weights


class _ChunkedSums(torch.autograd.Function):
    """(q, k, value channels, state) -> (sums, state after the last key, noise of the sums)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, plan: _Plan
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        of = _Chunks(q, k, v, plan)
        noise = q.new_zeros(len(q), *q.shape[2:]) if plan.spec.row_sum is not None else None

        def note(where: slice, queries: Tensor, state: Tensor) -> None:
            if noise is not None:
                size = read_noise(queries, state, plan.spec, of.weights)
                noise[..., where] = size.unflatten(1, (q.shape[2], -1))

        out = q.new_empty(len(q), v.shape[1], *q.shape[2:])
        seen, kept = state, []

        def add(where: slice, features: Tensor) -> Tensor:
            if seen is None:
                return v[..., where] @ features.mT
            return seen.baddbmm(v[..., where], features.mT)

        if plan.causal:
            for where in _slices(0, of.past, plan.chunk):
                seen = add(where, of.features(k[..., where])[1][0])
            for where in _slices(0, q.shape[3], plan.chunk):
                if plan.differentiable:
                    kept.append(seen)
                here = slice(where.start + of.past, where.stop + of.past)
                queries, keys = of.queries(where), k[..., here]
                sums = v[..., here] @ of.hide_future(of.series(keys.mT @ queries))
                adds = plan.keep_state or where.stop < q.shape[3]
                if seen is not None:
                    used = of.features(queries, keys)[1] if adds else of.features(queries)[1]
                    sums.baddbmm_(of.weights * seen, used[0])
                    note(where, queries, seen)
                    seen = add(here, used[1]) if adds else seen
                elif adds:
                    seen = add(here, of.features(keys)[1][0])
                of.place(sums, out, where)
        else:
            for where in _slices(0, k.shape[2], plan.chunk):
                seen = add(where, of.features(k[..., where])[1][0])
            seen = of.no_state() if seen is None else seen  # no key at all
            kept.append(seen)
            weighted = of.weights * seen
            for where in _slices(0, q.shape[3], plan.chunk):
                queries = of.queries(where)
                of.place(weighted @ of.features(queries)[1][0], out, where)
                note(where, queries, seen)
        if plan.differentiable:
            ctx.save_for_backward(q, k, v, *kept)
            ctx.plan, ctx.had_state = plan, state is not None
            ctx.set_materialize_grads(False)
        if noise is not None:
            ctx.mark_non_differentiable(noise)
        if not plan.keep_state:
            return out, None, noise
        return out, of.no_state() if seen is None else seen, noise

    @staticmethod
    @once_differentiable
    @in_own_precision
    def backward(
        ctx: Any, grad: Tensor | None, dseen: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        of = _Chunks(q, k, v, plan)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        if grad is None:
            grad = q.new_zeros(len(q), v.shape[1], *q.shape[2:])

        def through_state(queries: slice | None, keys: slice | None, seen: Tensor | None) -> None:
            """Gradients of queries that read the state ``seen``, and of keys that were added."""
            nonlocal dseen
            dafter, columns, dfeatures = dseen, [], []
            if queries is not None and seen is not None:
                columns.append(of.queries(queries))
            if keys is not None and dafter is not None:
                columns.append(k[..., keys])
            if not columns:
                return
            every, used = of.features(*columns)
            if queries is not None and seen is not None:
                out = of.queries(queries, grad)
                dfeatures.append((of.weights * seen).mT @ out)
                added = of.weights * (out @ used[0].mT)
                dseen = added if dafter is None else dafter + added
            if keys is not None and dafter is not None:
                dfeatures.append(dafter.mT @ v[..., keys])
                dv[..., keys] += dafter @ used[-1]
            dcolumns = of.columns_grad(columns, every, torch.cat(dfeatures, dim=2))
            if queries is not None and seen is not None:
                of.place(dcolumns[0], dq, queries)
            if keys is not None and dafter is not None:
                dk[..., keys] += dcolumns[-1]

        if plan.causal:
            slope = of.series.derivative()
            for where in reversed(_slices(0, q.shape[3], plan.chunk)):
                here = slice(where.start + of.past, where.stop + of.past)
                through_state(where, here, kept.pop())
                queries, keys, out = of.queries(where), k[..., here], of.queries(where, grad)
                scores = keys.mT @ queries
                dv[..., here] += out @ of.hide_future(of.series(scores)).mT
                dscores = of.hide_future(slope(scores)).mul_(v[..., here].mT @ out)
                dk[..., here] += queries @ dscores.mT
                dq[..., where] += (keys @ dscores).unflatten(2, (q.shape[2], -1))
            for where in _slices(0, of.past, plan.chunk):
                through_state(None, where, None)
        else:
            for where in _slices(0, q.shape[3], plan.chunk):
                through_state(where, None, kept[0])
            for where in _slices(0, k.shape[2], plan.chunk):
                through_state(None, where, None)
        return dq, dk, dv, dseen if ctx.had_state else None, None
