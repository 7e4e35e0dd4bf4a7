"""The chunked form's loops of PyTorch operations, for any call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from softmax_rnn.ops.forms.chunks import step as chunk_step
from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.chunks.settings import Settings
from softmax_rnn.ops.forms.chunks.tables import make_tables
from softmax_rnn.ops.work import heads_per_step


def by_heads(settings: Settings, inputs: Columns) -> Iterator[tuple[slice, TorchChunks]]:
    """Slices of the key/value heads that fit the cache together, each with its chunks."""
    q = inputs.queries
    count = heads_per_step(settings.spec, q.shape[1], settings.chunk, q.shape[2], q.device.type)
    for start in range(0, len(q), count):
        heads = slice(start, start + count)
        yield heads, TorchChunks(settings, inputs.of(heads))


class TorchChunks:
    """The chunks of some heads, and the loops of both passes."""

    def __init__(self, settings: Settings, inputs: Columns) -> None:
        self.settings = settings
        q, k, v, state, log_decay, self.coefficients = inputs
        self.tables = make_tables(settings.spec, q.shape[1], settings.chunk, q.dtype, q.device)
        self.state_shape = (*v.shape[:2], len(self.tables.weights))
        self.state = state
        # Two views of the keys: those before the first query, and those at the queries' positions.
        count = settings.earlier_keys(q, k)
        self.earlier, self.own = slice(count), slice(count, None)
        self.queries = self.split(q)
        self.earlier_keys = self.keys(k, v, log_decay, self.earlier)
        self.own_keys: list[chunk_step.Keys | None] = [None] * len(self.queries)
        if settings.causal:
            self.own_keys = [*self.keys(k, v, log_decay, self.own)]

    def new_state(self) -> Tensor:
        """Uninitialised memory for a state."""
        return self.tables.weights.new_empty(self.state_shape)

    def zero_state(self) -> Tensor:
        """The state before the first key."""
        return self.new_state().zero_()

    def split(self, x: Tensor) -> list[Tensor]:
        """The columns of each chunk; the query heads of one key head become adjacent."""
        length = self.settings.chunk
        return [x[..., i : i + length].flatten(2) for i in range(0, x.shape[-1], length)]

    def keys(
        self, k: Tensor, v: Tensor, log_decay: Tensor | None, here: slice
    ) -> list[chunk_step.Keys]:
        """The keys of each chunk, of some positions."""
        ks, vs = self.split(k[..., here]), self.split(v[..., here])
        decays: Sequence[Tensor | None] = [None] * len(ks)
        if log_decay is not None:
            decays = self.split(log_decay[..., here])
        return [chunk_step.Keys(*chunk) for chunk in zip(ks, vs, decays, strict=True)]

    def write(self, chunk: Tensor | None, out: Tensor, index: int) -> None:
        """The inverse of ``split``: write a chunk to its columns of ``out``; zeros for ``None``."""
        columns = out[..., index * self.settings.chunk : (index + 1) * self.settings.chunk]
        if chunk is None:
            columns.zero_()
        else:
            columns.copy_(chunk.view(columns.shape))

    def sums(self, out: Tensor, last_state: Tensor, kept: list[Tensor]) -> None:
        """Fill the sums, the state after all keys and the backward pass's states."""
        state, settings = self.state, self.settings
        buffers = itertools.chain(kept, (self.new_state() for _ in itertools.count()))
        for i, earlier in enumerate(self.earlier_keys, 1):
            new_state = next(buffers) if i == len(self.earlier_keys) else self.new_state()
            chunk_step.forward(self.tables, None, earlier, state, new_state)
            state = new_state
        for i, (q, keys) in enumerate(zip(self.queries, self.own_keys, strict=True)):
            last, buffer = i + 1 == len(self.queries), None
            if keys is not None and (not last or settings.keep_state):
                buffer = last_state if last and settings.keep_state else next(buffers)
            queries = chunk_step.Queries(q, self.coefficients)
            sums = chunk_step.forward(self.tables, queries, keys, state, buffer)
            self.write(sums, out, i)
            state = state if buffer is None else buffer
        if settings.keep_state and state is not last_state:
            last_state.copy_(self.zero_state() if state is None else state)

    def grads(
        self, dsums: Tensor, dstate: Tensor | None, kept: list[Tensor], grads: Columns
    ) -> None:
        """Fill all ``grads`` but that of log decays.

        ``dsums`` and ``dstate`` are the gradients of the sums and of the state after all keys.
        """
        read = kept if self.earlier_keys else [self.state, *kept]
        parts = self.split(dsums)
        assert grads.coefficients is not None  # empty without any
        assert grads.state is not None
        grads.coefficients.zero_()
        for i in reversed(range(len(self.queries))):
            queries = chunk_step.Queries(self.queries[i], self.coefficients, parts[i])
            keys, state = self.own_keys[i], read[i if self.settings.causal else 0]
            found = chunk_step.backward(self.tables, queries, keys, state, dstate)
            self.write(found.q, grads.queries, i)
            if keys is not None:
                self.write(found.k, grads.keys[..., self.own], i)
                self.write(found.v, grads.values[..., self.own], i)
            if found.coefficients is not None:
                grads.coefficients.add_(found.coefficients)
            dstate = dstate if found.state is None else found.state
        for i in reversed(range(len(self.earlier_keys))):
            found = chunk_step.backward(self.tables, None, self.earlier_keys[i], None, dstate)
            self.write(found.k, grads.keys[..., self.earlier], i)
            self.write(found.v, grads.values[..., self.earlier], i)
            dstate = dstate if found.state is None else found.state
        if grads.state.numel():
            grads.state.copy_(self.zero_state() if dstate is None else dstate)
