"""The decays of the Triton kernels' chunks, and the boundaries of these chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.decay import fade_
from softmax_rnn.ops.forms.gpu.pairs import running_sums


class Slots(NamedTuple):
    """The boundaries of chunks, where states are.

    The keys before the first query, if there are any, are the first chunk: all keys if the
    attention is not causal.

    Attributes:
        before: number of these keys.
        skip: of chunks that they are, 1 or 0.
        length: tokens of every other chunk.
        chunks: number of chunks.
        read: of slots whose state is needed: that after the last chunk not always.
    """

    before: int
    skip: int
    length: int
    chunks: int
    read: int

    def chunk_of(self, keys: int, device: torch.device) -> Tensor:
        """The chunk of every key, [S]."""
        own = torch.arange(keys, device=device) - self.before
        return (own.div(self.length, rounding_mode="floor") + self.skip).clamp_(min=0)

    def last_of(self, keys: int, device: torch.device) -> Tensor:
        """The last key of every chunk, [chunks]."""
        chunk = torch.arange(self.chunks, device=device)
        ends = (chunk + 1 - self.skip) * self.length
        return ends.clamp_(max=keys - self.before) + self.before - 1


def slots_of(causal: bool, chunk: int, keep_state: bool, queries: int, keys: int) -> Slots:
    """The boundaries of chunks of ``chunk`` tokens; with ``keep_state`` the last one counts."""
    before = keys - queries if causal else keys
    skip = 1 if before else 0
    if not causal:
        return Slots(before, skip, queries, skip, skip + 1)
    count = skip + -(-queries // chunk)
    return Slots(before, skip, chunk, count, count + keep_state)


class FadingRows(NamedTuple):
    """The factors of decays, as in ``fading.py``; ``None`` for 1.

    Attributes:
        queries: of what queries read from a state, [X, T].
        keys: of values that are added to a state, [X, S].
        chunks: of the state before each chunk, [X, chunks].
        running: sums of log decays, as ``fading_between`` reads them.
    """

    queries: Tensor | None = None
    keys: Tensor | None = None
    chunks: Tensor | None = None
    running: Tensor | None = None


def fading(slots: Slots, log_decay: Tensor | None, dtype: torch.dtype) -> FadingRows:
    """The factors of log decays [X, 1, S]."""
    if log_decay is None:
        return FadingRows()
    of = log_decay.shape[2], log_decay.device
    total, chunk = log_decay.squeeze(1).cumsum(-1), slots.chunk_of(*of)
    end = total[:, slots.last_of(*of)]
    start = F.pad(end, (1, -1))
    read = (total - start[:, chunk])[:, slots.before :]
    exponents = read, end[:, chunk] - total, end - start
    queries, keys, chunks = (fade_(x.to(dtype, copy=True)).contiguous() for x in exponents)
    return FadingRows(queries, keys, chunks, running_sums(log_decay, dtype))


def decay_grad(
    slots: Slots, log_decay: Tensor, by_query: Tensor, by_key: Tensor, inner: Tensor
) -> Tensor:
    """The gradient of log decays, [X, 1, S].

    A decay fades what its own and later queries of the chunk read from the state, what earlier
    keys of the chunk add to it, the state between (``inner``), and the pairs within the chunk
    of an earlier key and a later query. Only these pairs are a difference of two sums. A query's
    own key and the other chunks are left out: their terms would cancel, with large rounding errors.
    """
    dtype, of = log_decay.dtype, (log_decay.shape[2], log_decay.device)
    read, pairs = F.pad(by_query.sum(1, dtype=dtype), (0, 0, slots.before, 0)).unbind(-1)
    added, lost = by_key.to(dtype).unbind(-1)
    chunk, last = slots.chunk_of(*of), slots.last_of(*of)

    def to_the_end(x: Tensor) -> Tensor:
        later = F.pad(x.flip(1).cumsum(1).flip(1), (0, 1))
        return later[:, :-1] - later[:, last + 1][:, chunk]

    before = F.pad(added.cumsum(1), (1, 0))
    start = F.pad(last + 1, (1, -1))[chunk]
    earlier = before[:, :-1] - before[:, start]
    found = to_the_end(read + pairs - lost) + earlier + inner[:, chunk]
    return found.unsqueeze(1)
