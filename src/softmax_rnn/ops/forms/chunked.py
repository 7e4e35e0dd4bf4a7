"""A finite series in time linear in the length: states between chunks, scores within them.

Computes section 3.1's recurrence (``reference.power_rnn``), all powers stacked in one state, a
chunk of tokens at a time. The monomials of a chunk's keys times its values are added to the state.
The monomials of a chunk's queries read the state of all earlier keys; the keys of their own chunk
count by their scores. The sum of weights is one more value channel, of ones. The backward pass
walks the chunks in reverse and recomputes their monomials; it keeps one state a chunk.

Both passes are PyTorch operators: a compiled model calls them without a graph break, whatever the
number of chunks. The work on one chunk is in ``chunk_step``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from softmax_rnn.ops.cost import chunk_length, heads_per_step, sizes_of
from softmax_rnn.ops.forms import chunk_step
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, no_data, without_autocast
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
    chunk: int | None = None,
) -> RowSums:
    """As :func:`softmax_rnn.ops.forms.dense.dense`, after the keys summed up in ``state``.

    The mask is per key, broadcastable to [B, Hkv, 1, S]; the state holds sums over earlier keys,
    [B, Hkv, E + 1, rows], or E without a row sum. ``keep_state`` asks for the state after the last
    key, and ``chunk`` is the tokens of a chunk, by default as many as are fastest. Chunks of one
    token are the recurrence as it is written.
    """
    qs, ks, vs, state = first_order(*_to_columns(q, k, v, spec, mask, state, keep_state))
    inputs = (qs, ks, vs) if state is None else (qs, ks, vs, state)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    chunk = chunk or chunk_length(sizes_of(spec, q, k, v, causal))
    noisy = spec.row_sum is not None and spec.terms_can_cancel
    plan = _Plan(spec.series, degrees(spec)[1], noisy, causal, chunk, keep_state, differentiable)
    # As an operator only where it has to be one: a call of it costs much of a step of one token.
    compute = _sums if differentiable or no_data(q) else _compute_sums
    sums, last_state, noise, _ = compute(qs, ks, vs, state, *plan)
    last = last_state if keep_state else None
    return _from_columns(sums, spec, k, last, noise if noisy else None)


def _to_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    state: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scaled queries [N, D, G, T], keys [N, D, S], value channels [N, C, S], state [N, C, rows].

    N is B * Hkv. With a row sum there is one more channel, of ones. All channels of a hidden key
    are zero, so that it adds nothing to any sum.
    """
    dtype = compute_dtype(q.dtype)
    channels = v.to(dtype).mT
    if spec.row_sum is not None:
        channels = torch.cat([channels, channels.new_ones(*v.shape[:2], 1, v.shape[2])], dim=2)
    keys = k.to(dtype).mT
    if mask is not None:  # a factor of zero would keep a hidden NaN
        channels, keys = channels.masked_fill(~mask, 0.0), keys.masked_fill(~mask, 0.0)
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1)).movedim(-1, 2)
    queries = queries.flatten(0, 1) * spec.score_scale(q.shape[-1])
    keys, channels = (x.flatten(0, 1).contiguous() for x in (keys, channels))
    if state is not None:
        return queries, keys, channels, state.flatten(0, 1)
    if not keep_state:  # a state holds the keys as they are
        queries, keys = _balanced(queries, keys)
    return queries, keys, channels, None


def _balanced(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of equal size with the same products, as high powers of either overflow.

    The factor is a power of two for each head, so that nothing is rounded.
    """
    if not (q[0].numel() and k[0].numel()):
        return q, k
    largest = [x.detach().abs().flatten(1).amax(1) for x in (q, k)]
    exponent = ((largest[0].log2() - largest[1].log2()) / 2).round()
    ratio = torch.where(exponent.isfinite(), exponent, 0.0).exp2()
    return q / ratio.view(-1, 1, 1, 1), k * ratio.view(-1, 1, 1)


def _from_columns(
    sums: Tensor, spec: AttentionSpec, k: Tensor, state: Tensor | None, noise: Tensor | None
) -> RowSums:
    """[N, C, G, T], the state [N, C, rows] and the noise [N, G, T] in the layout of forms."""
    sums = sums.unflatten(0, k.shape[:2]).movedim(2, -1).flatten(1, 2)
    state = None if state is None else state.unflatten(0, k.shape[:2])
    if spec.row_sum is None:
        return RowSums(sums, state=state)
    noise = None if noise is None else noise.unflatten(0, k.shape[:2]).flatten(1, 2)
    return RowSums(sums[..., :-1], sums[..., -1], state=state, noise=noise)


class _Plan(NamedTuple):
    """What both passes need besides the tensors: the last arguments of the operators."""

    series: Series
    order: int
    noisy: bool  # whether the last channel is a sum of weights whose terms can cancel
    causal: bool
    chunk: int
    keep_state: bool
    differentiable: bool

    @property
    def spec(self) -> AttentionSpec:
        """One with the same weights."""
        return _plain_spec(self.series, self.order)

    def earlier_keys(self, q: Tensor, k: Tensor) -> int:
        """Keys before the first query, which are read from the state only."""
        return k.shape[2] - q.shape[3] if self.causal else k.shape[2]

    def kept_states(self, q: Tensor, k: Tensor) -> int:
        """States that the backward pass needs: those that queries read, except the initial one."""
        if not self.differentiable:
            return 0
        read = -(-q.shape[3] // self.chunk) if self.causal else 1
        return read if self.earlier_keys(q, k) else max(0, read - 1)


@functools.cache
def _plain_spec(series: Series, order: int) -> AttentionSpec:
    return AttentionSpec(series=series, order=order)


_PLAN = (
    "str series, int order, bool noisy, bool causal, SymInt chunk, bool keep_state, "
    "bool differentiable) -> (Tensor, Tensor, Tensor, Tensor)"
)
_TAGS = (torch.Tag.cudagraph_unsafe,)  # the first call compiles steps and makes tables


@torch.no_grad()
def _compute_sums(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums, the state after the last key, the noise of the sums, and the states kept.

    An operator cannot return ``None``: outputs that are not needed are empty.
    """
    outputs = _empty_sums(q, k, v, state, *arguments)
    plan = _Plan(*arguments)
    for heads, chunks in _by_heads(plan, q, k, v, state):
        out, last_state, noise = (x[heads] for x in outputs[:3])
        chunks.sums(out, last_state, noise, list(outputs[3][:, heads]))
    return outputs


def _empty_sums(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _Plan(*arguments)
    shape = (*v.shape[:2], state_rows(plan.spec, q.shape[1]))
    return (
        q.new_empty(*v.shape[:2], *q.shape[2:]),
        q.new_empty(shape if plan.keep_state else 0),
        q.new_empty((len(q), *q.shape[2:]) if plan.noisy else 0),
        q.new_empty(plan.kept_states(q, k), *shape),
    )


_sums = library.custom_op(
    "softmax_rnn::chunked_sums",
    _compute_sums,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? state, {_PLAN}",
    tags=_TAGS,
)
_sums.register_fake(_empty_sums)


@library.custom_op(
    "softmax_rnn::chunked_grads",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? state, Tensor kept, Tensor? dout, "
    f"Tensor? dlast_state, {_PLAN}",
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
    dlast_state: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, value channels and the initial state."""
    outputs = _empty_grads(q, k, v, state)
    plan = _Plan(*arguments)
    if dout is None:
        dout = q.new_zeros(*v.shape[:2], *q.shape[2:])
    for heads, chunks in _by_heads(plan, q, k, v, state):
        dq, dk, dv, dstate = (x[heads] for x in outputs)
        found = None if dlast_state is None else dlast_state[heads]
        found = chunks.grads(dout[heads], found, list(kept[:, heads]), dq, dk, dv)
        if state is not None:
            dstate.copy_(chunks.zero_state() if found is None else found)
    return outputs


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


@without_autocast
def _backward(ctx: Any, dout: Tensor | None, dlast: Tensor | None, *_: None) -> tuple[Any, ...]:
    dlast = dlast if _Plan(*ctx.plan).keep_state else None
    saved = ctx.saved_tensors  # once: checkpointing allows no second time
    *grads, dstate = _grads(*saved, dout, dlast, *ctx.plan)
    had_state = saved[3] is not None
    return *grads, dstate if had_state else None, *(None for _ in ctx.plan)


_sums.register_autograd(_backward, setup_context=_save)


def _by_heads(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> Iterator[tuple[slice, _Chunks]]:
    """The chunks of as many key/value heads as fit the cache together, and which heads."""
    count = heads_per_step(plan.spec, q.shape[1], plan.chunk, q.shape[2], q.device.type)
    for start in range(0, len(q), count):
        heads = slice(start, start + count)
        before = None if state is None else state[heads]
        yield heads, _Chunks(plan, q[heads], k[heads], v[heads], before)


class _Chunks:
    """The chunks of some heads, and both passes over them."""

    def __init__(self, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> None:
        self.plan = plan
        several = 1 < plan.chunk < max(q.shape[3], k.shape[2])
        self.compiled = q.device.type in chunk_step.COMPILED and several
        key = (plan.spec, q.shape[1], plan.chunk, q.dtype, q.device, self.compiled)
        self.tables = chunk_step.make_tables(*key)
        self.cache_key = (*key, plan.noisy, plan.causal, *q.shape[:3], v.shape[1])
        self.state_shape = (*v.shape[:2], len(self.tables.weights))
        if self.compiled:  # always with a state, so that there is one kind of step to compile
            state = self.zero_state() if state is None else state.contiguous()
        self.state = state
        # Two views of k and v: the keys before the first query, and those beside the queries.
        count = plan.earlier_keys(q, k)
        self.earlier, self.beside = slice(count), slice(count, None)
        self.queries = self.split(q)
        self.earlier_pairs = self.pairs(k[..., self.earlier], v[..., self.earlier])
        self.own_pairs: list[chunk_step.Keys | None] = [None] * len(self.queries)
        if plan.causal:
            self.own_pairs = [*self.pairs(k[..., self.beside], v[..., self.beside])]

    def step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function`` of one chunk, compiled where that pays."""
        if self.compiled:
            function = chunk_step.compiled(function, chunk_step.BACKEND, self.cache_key)
        return function(self.tables, *arguments)

    def new_state(self) -> Tensor:
        """Uninitialised memory for a state."""
        return self.tables.weights.new_empty(self.state_shape)

    def zero_state(self) -> Tensor:
        """The state before the first key."""
        return self.new_state().zero_()

    def split(self, x: Tensor) -> list[Tensor]:
        """Columns by chunks, the query heads of a key head side by side."""
        length = self.plan.chunk
        if not self.compiled:
            return [x[..., i : i + length].flatten(2) for i in range(0, x.shape[-1], length)]
        # A step is compiled for one shape: zeros at the end, which add nothing, make chunks alike.
        x = F.pad(x, (0, -x.shape[-1] % length)).unflatten(-1, (-1, length)).movedim(-2, 0)
        return list(x.contiguous().flatten(3))

    def pairs(self, k: Tensor, v: Tensor) -> list[chunk_step.Keys]:
        """Keys and their value channels by chunks."""
        return list(zip(self.split(k), self.split(v), strict=True))

    def write(self, chunk: Tensor | None, out: Tensor, index: int) -> None:
        """The inverse of ``split``: write a chunk to its columns of ``out``; zeros for none."""
        columns = out[..., index * self.plan.chunk : (index + 1) * self.plan.chunk]
        if chunk is None:
            columns.zero_()
        else:
            columns.copy_(chunk.view(*columns.shape[:-1], -1)[..., : columns.shape[-1]])

    def sums(self, out: Tensor, last_state: Tensor, noise: Tensor, kept: list[Tensor]) -> None:
        """Fill the sums, the state after all keys, the sums' noise and the states to keep."""
        state, plan = self.state, self.plan
        buffers = itertools.chain(kept, (self.new_state() for _ in itertools.count()))
        for i, keys in enumerate(self.earlier_pairs, 1):
            new_state = next(buffers) if i == len(self.earlier_pairs) else self.new_state()
            self.step(chunk_step.forward, None, keys, state, new_state, False)
            state = new_state
        for i, (q, pair) in enumerate(zip(self.queries, self.own_pairs, strict=True)):
            last, buffer = i + 1 == len(self.queries), None
            if pair is not None and (not last or plan.keep_state or self.compiled):
                buffer = last_state if last and plan.keep_state else next(buffers)
            sums, size = self.step(chunk_step.forward, q, pair, state, buffer, plan.noisy)
            self.write(sums, out, i)
            if plan.noisy:
                self.write(size, noise, i)
            state = state if buffer is None else buffer
        if plan.keep_state and state is not last_state:
            last_state.copy_(self.zero_state() if state is None else state)

    def grads(
        self,
        dout: Tensor,
        dstate: Tensor | None,
        kept: list[Tensor],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> Tensor | None:
        """Fill ``dq``, ``dk`` and ``dv`` and return the gradient of the initial state, if any.

        ``dout`` and ``dstate`` are the gradients of the sums and of the state after all keys.
        """
        if self.compiled:
            dstate = self.zero_state() if dstate is None else dstate.contiguous()
        read = kept if self.earlier_pairs else [self.state, *kept]
        douts = self.split(dout)
        for i in reversed(range(len(self.queries))):
            queries, pair = (self.queries[i], douts[i]), self.own_pairs[i]
            state = read[i if self.plan.causal else 0]
            grads = self.step(chunk_step.backward, queries, pair, state, dstate)
            self.write(grads[0], dq, i)
            if pair is not None:
                self.write(grads[1], dk[..., self.beside], i)
                self.write(grads[2], dv[..., self.beside], i)
            dstate = dstate if grads[3] is None else grads[3]
        for i, keys in enumerate(self.earlier_pairs):
            grads = self.step(chunk_step.backward, None, keys, None, dstate)
            self.write(grads[1], dk[..., self.earlier], i)
            self.write(grads[2], dv[..., self.earlier], i)
        return dstate
