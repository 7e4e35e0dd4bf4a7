"""The chunked form, for a finite series: a state between chunks, scores within chunks.

It computes section 3.1's recurrence (``reference.power_rnn``), one chunk of tokens at a time, with
all powers stacked in one state. Time is linear in the length. The monomials of a chunk's keys times
its values are added to the state. The monomials of a chunk's queries are multiplied by the state of
all earlier keys; keys of the same chunk are weighted by their scores. The weight sum is an
additional value channel of ones. The backward pass processes the chunks in reverse order and
recomputes their monomials; it needs one stored state per chunk.

Both passes are PyTorch operators: a compiled model calls them without a graph break, for any number
of chunks. ``chunk_step`` computes one chunk.
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
    """As :func:`softmax_rnn.ops.forms.dense.dense`, with the earlier keys summed in ``state``.

    The mask is per key, broadcastable to [B, Hkv, 1, S]. The state holds sums over earlier keys:
    [B, Hkv, E + 1, rows], or E without a row sum. ``keep_state`` requests the state after the last
    key. ``chunk`` is the number of tokens per chunk, by default the fastest; 1 is the plain
    recurrence.
    """
    qs, ks, vs, state = first_order(*_to_columns(q, k, v, spec, mask, state, keep_state))
    inputs = (qs, ks, vs) if state is None else (qs, ks, vs, state)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    chunk = chunk or chunk_length(sizes_of(spec, q, k, v, causal))
    noisy = spec.row_sum is not None and spec.terms_can_cancel
    plan = _Plan(spec.series, degrees(spec)[1], noisy, causal, chunk, keep_state, differentiable)
    # The operator is used only where it is needed: its overhead is large for a single token.
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
    if mask is not None:  # not multiplied by 0: a hidden NaN would stay NaN
        channels, keys = channels.masked_fill(~mask, 0.0), keys.masked_fill(~mask, 0.0)
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1)).movedim(-1, 2)
    queries = queries.flatten(0, 1) * spec.score_scale(q.shape[-1])
    keys, channels = (x.flatten(0, 1).contiguous() for x in (keys, channels))
    if state is not None:
        return queries, keys, channels, state.flatten(0, 1)
    if not keep_state:  # a state stores unscaled keys
        queries, keys = _balanced(queries, keys)
    return queries, keys, channels, None


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


def _from_columns(
    sums: Tensor, spec: AttentionSpec, k: Tensor, state: Tensor | None, noise: Tensor | None
) -> RowSums:
    """Sums [N, C, G, T], state [N, C, rows] and noise [N, G, T] as :class:`RowSums`."""
    sums = sums.unflatten(0, k.shape[:2]).movedim(2, -1).flatten(1, 2)
    state = None if state is None else state.unflatten(0, k.shape[:2])
    if spec.row_sum is None:
        return RowSums(sums, state=state)
    noise = None if noise is None else noise.unflatten(0, k.shape[:2]).flatten(1, 2)
    return RowSums(sums[..., :-1], sums[..., -1], state=state, noise=noise)


class _Plan(NamedTuple):
    """The arguments of both passes that are not tensors; the operators take them last."""

    series: Series
    order: int
    noisy: bool  # whether the last channel is a sum of weights whose terms can cancel
    causal: bool
    chunk: int
    keep_state: bool
    differentiable: bool

    @property
    def spec(self) -> AttentionSpec:
        """A spec with the same weights."""
        return _plain_spec(self.series, self.order)

    def earlier_keys(self, q: Tensor, k: Tensor) -> int:
        """Number of keys before the first query; queries read them only through the state."""
        return k.shape[2] - q.shape[3] if self.causal else k.shape[2]

    def kept_states(self, q: Tensor, k: Tensor) -> int:
        """Number of states for the backward pass: those that queries read, but the initial one."""
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
_TAGS = (torch.Tag.cudagraph_unsafe,)  # the first call compiles steps and builds tables


@torch.no_grad()
def _compute_sums(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums, the state after the last key, the noise, and the states for the backward pass.

    An operator cannot return ``None``, so unneeded outputs are empty tensors.
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
    saved = ctx.saved_tensors  # once: activation checkpointing allows only one access
    *grads, dstate = _grads(*saved, dout, dlast, *ctx.plan)
    had_state = saved[3] is not None
    return *grads, dstate if had_state else None, *(None for _ in ctx.plan)


_sums.register_autograd(_backward, setup_context=_save)


def _by_heads(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> Iterator[tuple[slice, _Chunks]]:
    """Slices of the key/value heads that fit the cache together, each with its chunks."""
    count = heads_per_step(plan.spec, q.shape[1], plan.chunk, q.shape[2], q.device.type)
    for start in range(0, len(q), count):
        heads = slice(start, start + count)
        before = None if state is None else state[heads]
        yield heads, _Chunks(plan, q[heads], k[heads], v[heads], before)


class _Chunks:
    """The chunks of some heads, and the loops of both passes."""

    def __init__(self, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> None:
        self.plan = plan
        several = 1 < plan.chunk < max(q.shape[3], k.shape[2])
        self.compiled = q.device.type in chunk_step.COMPILED and several
        key = (plan.spec, q.shape[1], plan.chunk, q.dtype, q.device, self.compiled)
        self.tables = chunk_step.make_tables(*key)
        self.cache_key = (*key, plan.noisy, plan.causal, *q.shape[:3], v.shape[1])
        self.state_shape = (*v.shape[:2], len(self.tables.weights))
        if self.compiled:  # always with a state, so that only one kind of step is compiled
            state = self.zero_state() if state is None else state.contiguous()
        self.state = state
        # Two views of k and v: the keys before the first query, and those at the queries'
        # positions.
        count = plan.earlier_keys(q, k)
        self.earlier, self.own = slice(count), slice(count, None)
        self.queries = self.split(q)
        self.earlier_pairs = self.pairs(k[..., self.earlier], v[..., self.earlier])
        self.own_pairs: list[chunk_step.Keys | None] = [None] * len(self.queries)
        if plan.causal:
            self.own_pairs = [*self.pairs(k[..., self.own], v[..., self.own])]

    def step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` for one chunk, compiled on a GPU."""
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
        """The columns of each chunk; the query heads of one key head become adjacent."""
        length = self.plan.chunk
        if not self.compiled:
            return [x[..., i : i + length].flatten(2) for i in range(0, x.shape[-1], length)]
        # A step is compiled for one shape. The last chunk is padded with zeros, which add nothing.
        x = F.pad(x, (0, -x.shape[-1] % length)).unflatten(-1, (-1, length)).movedim(-2, 0)
        return list(x.contiguous().flatten(3))

    def pairs(self, k: Tensor, v: Tensor) -> list[chunk_step.Keys]:
        """The keys and value channels of each chunk."""
        return list(zip(self.split(k), self.split(v), strict=True))

    def write(self, chunk: Tensor | None, out: Tensor, index: int) -> None:
        """The inverse of ``split``: write a chunk to its columns of ``out``; zeros for ``None``."""
        columns = out[..., index * self.plan.chunk : (index + 1) * self.plan.chunk]
        if chunk is None:
            columns.zero_()
        else:
            columns.copy_(chunk.view(*columns.shape[:-1], -1)[..., : columns.shape[-1]])

    def sums(self, out: Tensor, last_state: Tensor, noise: Tensor, kept: list[Tensor]) -> None:
        """Fill the sums, the state after all keys, the noise and the backward pass's states."""
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
                self.write(grads[1], dk[..., self.own], i)
                self.write(grads[2], dv[..., self.own], i)
            dstate = dstate if grads[3] is None else grads[3]
        for i, keys in enumerate(self.earlier_pairs):
            grads = self.step(chunk_step.backward, None, keys, None, dstate)
            self.write(grads[1], dk[..., self.earlier], i)
            self.write(grads[2], dv[..., self.earlier], i)
        return dstate
