"""What both passes of the chunked form need to know besides tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.chunks.tables import make_tables
from softmax_rnn.ops.forms.cpu import chunks as native_chunks
from softmax_rnn.ops.forms.gpu import chunks as triton_chunks
from softmax_rnn.ops.spec import AttentionSpec, Decay, Series

Loops = Literal["torch", "native", "triton"]  # what computes the chunks


class Settings(NamedTuple):
    """The arguments of both passes that are not tensors; the operators take them last."""

    series: Series
    order: int
    coefficients: Sequence[float] | None  # of a polynomial, the same for all heads
    decay: Decay
    causal: bool
    chunk: int
    keep_state: bool
    differentiable: bool
    loops: Loops
    scale: float  # of scores; only the loops in Triton apply it, other queries already have it
    products: str  # of the loops in Triton

    @property
    def spec(self) -> AttentionSpec:
        """A spec with the same weights."""
        fixed = None if self.coefficients is None else tuple(self.coefficients)
        return plain_spec(self.series, self.order, fixed, self.decay)

    def native(self, inputs: Columns) -> native_chunks.ChunksInCpp:
        """The chunks as ``cpu/chunks.py`` takes them."""
        q = inputs.queries
        tables = make_tables(self.spec, q.shape[1], self.chunk, q.dtype, q.device)
        return native_chunks.ChunksInCpp(tables, self.causal, self.chunk)

    def triton(self) -> triton_chunks.ChunkKernels:
        """The chunks as ``gpu/chunks.py`` takes them."""
        types = self.scale, self.products
        return triton_chunks.ChunkKernels(
            self.spec, *types, self.causal, self.chunk, self.keep_state
        )

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
def plain_spec(
    series: Series, order: int, coefficients: tuple[float, ...] | None, decay: Decay
) -> AttentionSpec:
    """A spec with these weights and nothing else."""
    return AttentionSpec(series=series, order=order, coefficients=coefficients, decay=decay)
