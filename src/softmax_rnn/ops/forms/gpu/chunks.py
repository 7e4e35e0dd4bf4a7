"""The chunked form's loops as Triton kernels, for fixed series of order 1 and 2.

``chunked`` calls them in place of its own, and does the rest. Every chunk first adds its keys to a
state of its own; a scan over the chunks adds these up; then all chunks read them at once. Monomials
stay on the chip; memory has one state per chunk, in the kernels' order of rows
(``chunk_kernels.py``). The backward pass does the same with the gradients of the states. The
kernels are imported at the first call.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.gpu.decays import Slots, decay_grad, fading, slots_of
from softmax_rnn.ops.forms.gpu.layout import SIDE, layout, tiles
from softmax_rnn.ops.forms.gpu.pairs import products
from softmax_rnn.ops.spec import AttentionSpec

MAX_WIDTH, WIDTHS = 128, 16  # heads are multiples of 16 wide
TOKENS = 64  # the lengths of chunks are multiples of this
_ELEMENTS = 2**28  # of the states that are in memory at once, but those for the backward pass
# By the products: tokens of a tile and pipeline stages. Without tensor cores, factors of a product
# are in registers, where those of longer tiles do not fit.
_TILES = {"bfloat16": (64, 2), "tf32": (32, 1), "ieee": (16, 1)}
_NARROW = 64  # up to this width of heads 4 warps share a tile, beyond it 8
_SCANNED = 1024  # elements of a state that a program adds up


class ChunkKernels(NamedTuple):
    """What is the same for all chunks of a call.

    Attributes:
        spec: the series and the decay.
        scale: of scores, which the queries do not have yet.
        products: ``bfloat16``, or the precision of products of the inputs' own type.
        length: tokens per chunk.
        keep_state: whether the state after all keys is wanted.
    """

    spec: AttentionSpec
    scale: float
    products: str
    causal: bool
    length: int
    keep_state: bool


def product_type(dtype: torch.dtype) -> str:
    """``products`` for inputs of a dtype."""
    return "bfloat16" if dtype == torch.bfloat16 else products(dtype)[0]


def states_shape(inputs: Columns, chunks: ChunkKernels) -> tuple[int, ...]:
    """The shape of the states that :func:`sums` keeps for the backward pass."""
    q, k, v, *_ = inputs
    rows = sum(tiles(chunks.spec, index(q.shape[1]))) * SIDE**2
    return len(q), _slots(chunks, q.shape[3], k.shape[2]).read, v.shape[1], rows


def sums(inputs: Columns, chunks: ChunkKernels, out: Tensor, last: Tensor, kept: Tensor) -> None:
    """Fill the sums, the state after all keys and the backward pass's states.

    The shapes are those of ``chunked``, and ``states_shape``; what is not needed is empty.
    """
    for heads, call in _by_heads(inputs, chunks):
        states = kept[heads] if kept.numel() else call.new_states(call.slots.read)
        call.states(states)
        call.sums(states, out[heads])
        if chunks.keep_state:
            last[heads] = call.layout.to_library(states[:, -1])


def gradients(
    inputs: Columns,
    chunks: ChunkKernels,
    kept: Tensor,
    dsums: Tensor,
    dlast: Tensor | None,
    out: Columns,
    decays: bool,
) -> None:
    """Fill the gradients ``out``, that of log decays if ``decays``."""
    for heads, call in _by_heads(inputs, chunks):
        own, states, grads = dsums[heads].resolve_neg(), kept[heads], out.of(heads)
        call.reads_last |= dlast is not None
        dstates = call.new_states(call.slots.chunks + 1)
        found = None if dlast is None else dlast[heads]
        inner = call.state_grads(own, found, dstates, states if decays else None)
        by_query, by_key = call.received() if decays else (None, None)
        call.query_grads(states, by_query, own, grads.queries)
        call.key_grads(dstates, by_key, own, grads.keys, grads.values)
        if inputs.state is not None:
            assert grads.state is not None
            counted = call.layout.to_library(dstates[:, 0]) * call.layout.multiplicities
            grads.state.copy_(counted)
        if by_query is not None and by_key is not None and inner is not None:
            assert grads.log_decay is not None
            assert call.inputs.log_decay is not None
            given = call.inputs.log_decay, by_query, by_key, inner
            grads.log_decay.copy_(decay_grad(call.slots, *given))


def _by_heads(inputs: Columns, chunks: ChunkKernels) -> Iterator[tuple[slice, _Launches]]:
    """Slices of the heads whose states are in memory together."""
    count = max(1, _ELEMENTS // math.prod(states_shape(inputs, chunks)[1:]))
    for start in range(0, len(inputs.queries), count):
        heads = slice(start, start + count)
        yield heads, _Launches(inputs.of(heads), chunks)


def _slots(chunks: ChunkKernels, queries: int, keys: int) -> Slots:
    return slots_of(chunks.causal, chunks.length, chunks.keep_state, queries, keys)


class _Launches:
    """Some heads of a call: the launches of the kernels, and what is small enough without them."""

    def __init__(self, inputs: Columns, chunks: ChunkKernels) -> None:
        self.chunks, self.inputs = chunks, inputs
        self.q, self.k, self.v = (_tokens(x.resolve_neg()) for x in inputs[:3])
        self.heads, self.groups, self.queries, self.width = self.q.shape
        self.keys, self.channels = self.v.shape[2:]
        self.slots = _slots(chunks, self.queries, self.keys)
        self.layout = layout(chunks.spec, self.width, chunks.scale, self.k.dtype, self.k.device)
        # Whether the states before the first chunk of queries and after the last one are not zero.
        self.reads_first = inputs.state is not None or self.slots.skip > 0
        self.reads_last = not chunks.causal
        self.kernels = importlib.import_module("softmax_rnn.ops.forms.gpu.chunk_kernels")
        self.tile, self.stages = _TILES[chunks.products]
        if self.kernels.INTERPRETED:  # where a program takes as long for any tile
            self.tile = TOKENS
        self.fading = fading(self.slots, inputs.log_decay, self.k.dtype)

    def new_states(self, slots: int) -> Tensor:
        """Uninitialised memory, [X, slots, C, rows]."""
        return self.k.new_empty(self.heads, slots, self.channels, len(self.layout.counts))

    def received(self) -> tuple[Tensor, Tensor]:
        """Uninitialised memory for what :func:`decay_grad` needs of queries and of keys."""
        by_query = self.k.new_empty(self.heads, self.groups, self.queries, 2)
        return by_query, self.k.new_empty(self.heads, self.keys, 2)

    def states(self, states: Tensor) -> None:
        """Fill slots with the states before each chunk, and after the last one."""
        given = self.inputs.state
        if states.shape[1] == 1 and given is None:
            states.zero_()
            return
        inputs = self.k, self.v, self.fading.keys, self.layout.blocks, None
        sizes = 1, states.shape[1], self.keys, self.slots.before, self.slots.skip + 1
        self._add(inputs, states, sizes)
        if given is not None:
            states[:, 0] = self.layout.from_library(given)
        self._scan(states)

    def state_grads(
        self, dsums: Tensor, dlast: Tensor | None, dstates: Tensor, states: Tensor | None
    ) -> Tensor | None:
        """Fill slots with the gradients of the states, without multiplicities.

        Returns the inner products of ``states`` with the gradients that they get through the states
        after them, [X, slots].
        """
        layout = self.layout
        inputs = self.q, _tokens(dsums), self.fading.queries, layout.blocks, layout.factors
        sizes = self.groups, dstates.shape[1], self.queries, 0, self.slots.skip
        self._add(inputs, dstates, sizes)
        if dlast is not None:
            dstates[:, -1] += layout.from_library(dlast / layout.multiplicities)
        return self._scan(dstates, states, reverse=True)

    def _add(
        self, inputs: tuple[Tensor | None, ...], states: Tensor, sizes: tuple[int, ...]
    ) -> None:
        strides = [x.stride() for x in inputs[:2] if x is not None]
        programs = self.heads * states[0, :, 0].numel() // SIDE**2
        length = self.slots.length
        self._launch("add_states", programs, *inputs, states, *strides, *sizes, length)

    def _scan(
        self, states: Tensor, other: Tensor | None = None, reverse: bool = False
    ) -> Tensor | None:
        size = self.channels * len(self.layout.counts)
        programs, slots = -(-size // _SCANNED), states.shape[1]
        inner = None if other is None else states.new_empty(self.heads, slots, programs)
        pointers = states, self.fading.chunks, other, self.layout.counts, inner
        sizes = self.slots.chunks, slots, slots if other is None else other.shape[1], size
        options = {"REVERSED": reverse, "BLOCK": _SCANNED}
        self._launch("scan_states", self.heads * programs, *pointers, *sizes, **options)
        return None if inner is None else inner.sum(2, dtype=torch.float64)

    def sums(self, states: Tensor, out: Tensor) -> None:
        """Fill the sums."""
        self._by_query("chunk_sums", states, (), out)

    def query_grads(
        self, states: Tensor, received: Tensor | None, dsums: Tensor, dq: Tensor
    ) -> None:
        """Fill the gradient of queries."""
        self._by_query("chunk_query_grads", states, (received,), dsums, dq)

    def _by_query(
        self, name: str, states: Tensor, received: tuple[Tensor | None, ...], *others: Tensor
    ) -> None:
        pointers = self.fading.queries, states, self.layout.weights, self.layout.blocks
        programs = self.heads * self.groups * -(-self.queries // self.tile)
        self._by_token(name, programs, (*pointers, *received), others, self.reads_first)

    def key_grads(
        self, dstates: Tensor, received: Tensor | None, dsums: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        """Fill the gradients of keys and values."""
        pointers = self.fading.keys, dstates, self.layout.counts, self.layout.blocks, received
        before = self.slots.before
        programs = self.heads * sum(-(-n // self.tile) for n in (before, self.keys - before))
        for outputs in ((dk, None), (None, dv)):
            others = dsums, *outputs
            self._by_token("chunk_key_grads", programs, pointers, others, self.reads_last)

    def _by_token(
        self,
        name: str,
        programs: int,
        pointers: tuple[Tensor | None, ...],
        others: Sequence[Tensor | None],
        edge: bool,
    ) -> None:
        given = self.q, self.k, self.v, self.fading.running, *pointers
        views = [None if x is None else _tokens(x) for x in others]
        strides = (None if x is None else x.stride() for x in (self.q, self.k, self.v, *views))
        states = pointers[1]
        assert states is not None
        sizes = self.groups, states.shape[1], self.queries, *self.slots[:3]
        self._launch(name, programs, *given, *views, *strides, *sizes, READ_EDGE=edge)

    def _launch(self, name: str, programs: int, *arguments: Any, **options: Any) -> None:
        kernel, dtype = getattr(self.kernels, name), self.k.dtype
        extra = self.channels % WIDTHS
        names = "A0", "A1", "A2"
        half = self.chunks.products == "bfloat16"
        language = self.kernels.tl
        constants = {
            "WIDTH": self.width,
            "BLOCK_D": _power_of_2(self.width),
            "CHANNELS": self.channels - extra,
            "BLOCK_C": _power_of_2(self.channels - extra),
            "EXTRA": extra,
            "PAIRS": len(self.layout.blocks),
            "ROWS": len(self.layout.counts),
            "CAUSAL": self.chunks.causal,
            "FACTOR": language.bfloat16 if half else getattr(language, str(dtype)[6:]),
            "PRECISION": "ieee" if half else self.chunks.products,
            "BLOCK": self.tile,
            **dict(zip(names, self.layout.coefficients, strict=True)),
        }
        used = {key: x for key, x in (constants | options).items() if key in kernel.arg_names}
        with torch.cuda.device(self.k.device) if self.k.is_cuda else nullcontext():
            warps = 4 if max(self.width, self.channels - extra) <= _NARROW else 8
            launch = {"num_warps": warps, "num_stages": self.stages}
            kernel[(programs,)](*arguments, **used, **launch)


def _tokens(x: Tensor) -> Tensor:
    """[X, C, T] or [X, C, R, T] as [X, R, T, C]."""
    return x.movedim(1, -1) if x.ndim == 4 else x.mT.unsqueeze(1)


def _power_of_2(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
