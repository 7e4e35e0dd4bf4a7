"""A finite series in time linear in the length: states between chunks, scores within them.

A chunk of keys adds its monomials times its values to the state (section 3.1: one state a power,
here stacked); a chunk of queries reads the state of all earlier keys with its monomials and meets
the keys of its own chunk by their scores. The sum of weights is one more value channel, of ones.
The backward pass walks the chunks in reverse and recomputes their monomials; it keeps one state a
chunk.

Everything stands in columns (a token is one), so that a product with the many rows of monomials
has its short side, the value channels, first: matrix products are several times faster that way.

Both passes are operators of their own to PyTorch: a compiled model calls them, whatever the number
of chunks, and its graph has no break. What is done with a chunk is ``chunk_step``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from softmax_rnn.ops.cost import chunk_length, heads_together
from softmax_rnn.ops.forms import chunk_step
from softmax_rnn.ops.forms.channels import from_columns, to_columns
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, in_own_precision
from softmax_rnn.ops.monomials import degrees, state_rows
from softmax_rnn.ops.spec import AttentionSpec, Series


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
    """As :func:`softmax_rnn.ops.forms.dense.dense`, after the keys that ``state`` has seen.

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
    qs, ks, vs, before = first_order(*to_columns(q, k, v, spec, mask, state, keep_state))
    inputs = (qs, ks, vs) if before is None else (qs, ks, vs, before)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    heads = max(1, k.shape[0] * k.shape[1])
    sizes = (spec, q.shape[2], k.shape[2], k.shape[3], v.shape[3])
    chunk = chunk_length(*sizes, heads=heads, groups=q.shape[1] // k.shape[1])
    weighs = spec.row_sum is not None and spec.cancels
    plan = _Plan(spec.series, degrees(spec)[1], weighs, causal, chunk, keep_state, differentiable)
    sums, after, noise, _ = _sums(qs, ks, vs, before, *plan)
    return from_columns(sums, spec, k, after if keep_state else None, noise if weighs else None)


class _Plan(NamedTuple):
    """What both passes need to know besides the tensors: the last arguments of the operators."""

    series: Series
    order: int
    weighs: bool
    causal: bool
    chunk: int
    keep_state: bool
    differentiable: bool

    @property
    def spec(self) -> AttentionSpec:
        """One of the same weights."""
        return AttentionSpec(series=self.series, order=self.order)

    def past(self, q: Tensor, k: Tensor) -> int:
        """Keys before those that queries meet by their scores."""
        return k.shape[2] - q.shape[3] if self.causal else k.shape[2]

    def states(self, q: Tensor, k: Tensor) -> int:
        """States to keep for the backward pass: those that queries read, less one that came in."""
        if not self.differentiable:
            return 0
        read = -(-q.shape[3] // self.chunk) if self.causal else 1
        return read if self.past(q, k) else max(0, read - 1)


_PLAN = (
    "str series, int order, bool weighs, bool causal, SymInt chunk, bool keep_state, "
    "bool differentiable) -> (Tensor, Tensor, Tensor, Tensor)"
)
_TAGS = (torch.Tag.cudagraph_unsafe,)  # steps are compiled, and tables made, when first met


@library.custom_op(
    "softmax_rnn::chunked_sums",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? state, {_PLAN}",
    tags=_TAGS,
)
@torch.no_grad()
def _sums(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums, the state after the last key, the noise of the sums, and the states kept.

    An operator returns no ``None``: what nobody asked for is empty.
    """
    made = _empty_sums(q, k, v, state, *arguments)
    plan = _Plan(*arguments)
    for some in _head_groups(q, plan):
        out, after, noise = (x[some] for x in made[:3])
        of = _Chunks(q[some], k[some], v[some], None if state is None else state[some], plan)
        seen = of.sums(out, noise, list(made[3][:, some]))
        if plan.keep_state:
            after.copy_(of.new_state().zero_() if seen is None else seen)
    return made


@_sums.register_fake
def _empty_sums(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _Plan(*arguments)
    one = (*v.shape[:2], state_rows(plan.spec, q.shape[1]))
    return (
        q.new_empty(*v.shape[:2], *q.shape[2:]),
        q.new_empty(one if plan.keep_state else 0),
        q.new_empty((len(q), *q.shape[2:]) if plan.weighs else 0),
        q.new_empty(plan.states(q, k), *one),
    )


@library.custom_op(
    "softmax_rnn::chunked_grads",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? state, Tensor kept, Tensor? dout, "
    f"Tensor? dafter, {_PLAN}",
    tags=_TAGS,
)
@torch.no_grad()
def _grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    kept: Tensor,
    dout: Tensor | None,
    dafter: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, value channels and the state that came in."""
    made = _empty_grads(q, k, v, state)
    plan = _Plan(*arguments)
    if dout is None:
        dout = q.new_zeros(*v.shape[:2], *q.shape[2:])
    for some in _head_groups(q, plan):
        dq, dk, dv, dstate = (x[some] for x in made)
        of = _Chunks(q[some], k[some], v[some], None if state is None else state[some], plan)
        dseen = None if dafter is None else dafter[some]
        dseen = of.grads(dout[some], dseen, list(kept[:, some]), dq, dk, dv)
        if state is not None:
            dstate.copy_(of.new_state().zero_() if dseen is None else dseen)
    return made


@_grads.register_fake
def _empty_grads(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dstate = q.new_empty(0) if state is None else torch.empty_like(state)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dstate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, state, *ctx.plan = inputs
    _, _, noise, kept = output
    ctx.save_for_backward(q, k, v, state, kept)
    ctx.mark_non_differentiable(noise, kept)
    ctx.set_materialize_grads(False)


@in_own_precision
def _backward(ctx: Any, dout: Tensor | None, dafter: Tensor | None, *_: None) -> tuple[Any, ...]:
    dafter = dafter if _Plan(*ctx.plan).keep_state else None
    saved = ctx.saved_tensors  # once: checkpointing lets nobody unpack them again
    *grads, dstate = _grads(*saved, dout, dafter, *ctx.plan)
    had_state = saved[3] is not None
    return *grads, dstate if had_state else None, *(None for _ in ctx.plan)


_sums.register_autograd(_backward, setup_context=_save)


def _head_groups(q: Tensor, plan: _Plan) -> Iterator[slice]:
    """Slices of the key/value heads whose monomials fit the cache together."""
    heads = heads_together(plan.spec, q.shape[1], plan.chunk, q.shape[2], q.device.type)
    for start in range(0, len(q), heads):
        yield slice(start, start + heads)


class _Chunks:
    """The chunks of some heads, and both passes over them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, plan: _Plan) -> None:
        self.plan = plan
        several = max(q.shape[3], k.shape[2]) > plan.chunk
        self.compiled = q.device.type in chunk_step.COMPILED and several
        kind = (plan.spec, q.shape[1], plan.chunk, q.dtype, q.device, self.compiled)
        self.kind = (*kind, plan.weighs, plan.causal, *q.shape[:3], v.shape[1])
        self.tables = chunk_step.tables(*kind)
        self.state_shape = (*v.shape[:2], len(self.tables.weights))
        if self.compiled:  # one kind of chunk is one to compile
            state = self.new_state().zero_() if state is None else state.contiguous()
        self.state = state
        self.past = plan.past(q, k)
        self.queries = self.pieces(q)
        self.earlier = self.pairs(k[..., : self.past], v[..., : self.past])
        self.own: list[chunk_step.Keys | None] = [None] * len(self.queries)
        if plan.causal:
            self.own = [*self.pairs(k[..., self.past :], v[..., self.past :])]

    def step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a step makes of a chunk."""
        if self.compiled:
            function = chunk_step.compiled(function, chunk_step.BACKEND, self.kind)
        return function(self.tables, *arguments)

    def new_state(self) -> Tensor:
        """Memory for a state."""
        return self.tables.weights.new_empty(self.state_shape)

    def pieces(self, x: Tensor) -> list[Tensor]:
        """Columns by chunks, the query heads of a key head side by side."""
        length = self.plan.chunk
        if not self.compiled:
            return [x[..., i : i + length].flatten(2) for i in range(0, x.shape[-1], length)]
        # All alike, for a step is compiled for one shape: zeros at the end, which add nothing.
        x = F.pad(x, (0, -x.shape[-1] % length)).unflatten(-1, (-1, length)).movedim(-2, 0)
        return list(x.contiguous().flatten(3))

    def pairs(self, k: Tensor, v: Tensor) -> list[chunk_step.Keys]:
        """Keys and their value channels by chunks."""
        return list(zip(self.pieces(k), self.pieces(v), strict=True))

    def place(self, piece: Tensor | None, out: Tensor, index: int) -> None:
        """The inverse of ``pieces``: write a chunk to its columns of ``out``; zeros for none."""
        where = out[..., index * self.plan.chunk : (index + 1) * self.plan.chunk]
        if piece is None:
            where.zero_()
        else:
            where.copy_(piece.view(*where.shape[:-1], -1)[..., : where.shape[-1]])

    def sums(self, out: Tensor, noise: Tensor, kept: list[Tensor]) -> Tensor | None:
        """Fill the sums, their noise and the states to keep; the state after the last key."""
        seen = self.state
        rooms = itertools.chain(kept, (self.new_state() for _ in itertools.count()))
        for i, keys in enumerate(self.earlier, 1):
            after = next(rooms) if i == len(self.earlier) else self.new_state()
            self.step(chunk_step.forward, None, keys, seen, after, False)
            seen = after
        to_the_end = self.plan.keep_state or self.compiled
        for i, (q, pair) in enumerate(zip(self.queries, self.own, strict=True)):
            adds = pair is not None and (to_the_end or i + 1 < len(self.queries))
            room = next(rooms) if adds else None
            columns, size = self.step(chunk_step.forward, q, pair, seen, room, self.plan.weighs)
            self.place(columns, out, i)
            if self.plan.weighs:
                self.place(size, noise, i)
            seen = room if adds else seen
        return seen

    def grads(
        self,
        dout: Tensor,
        dseen: Tensor | None,
        kept: list[Tensor],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> Tensor | None:
        """Fill the gradients of the columns; return that of the state that came in."""
        if self.compiled:
            dseen = self.new_state().zero_() if dseen is None else dseen.contiguous()
        read = kept if self.past else [self.state, *kept]
        douts = self.pieces(dout)
        for i in reversed(range(len(self.queries))):
            queries, pair = (self.queries[i], douts[i]), self.own[i]
            seen = read[i if self.plan.causal else 0]
            grads = self.step(chunk_step.backward, queries, pair, seen, dseen)
            self.place(grads[0], dq, i)
            if pair is not None:
                self.place(grads[1], dk[..., self.past :], i)
                self.place(grads[2], dv[..., self.past :], i)
            dseen = dseen if grads[3] is None else grads[3]
        for i, keys in enumerate(self.earlier):
            grads = self.step(chunk_step.backward, None, keys, None, dseen)
            self.place(grads[1], dk[..., : self.past], i)
            self.place(grads[2], dv[..., : self.past], i)
        return dseen
