"""Blocks of queries with their keys: which keys a block needs, which are hidden, how they fade."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.decay import FLOOR
from softmax_rnn.ops.forms.chunks.channel_scores import channel_gradients, channel_scores
from softmax_rnn.ops.forms.row_sums import (
    compute_dtype,
    first_positions,
    first_visible,
    no_data,
)
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec

BLOCK = 128  # queries per block
_MIN_BLOCK = 32
# Scores computed in one step, in elements. On a CPU they should fit its cache.
_CPU_SCORES, _GPU_SCORES = 2**19, 2**27
# A step may compute this many times the scores that its heads need: decays differ between heads.
_WASTE = 1.25


def block_length(spec: AttentionSpec, block: int = BLOCK) -> int:
    """The queries of a block: fewer with a narrow window, to compute fewer hidden pairs."""
    return min(block, max(_MIN_BLOCK, spec.hiding_window // 4)) if spec.hiding_window else block


class Step(NamedTuple):
    """Query rows ``start:stop`` of the key/value heads ``heads``, and the keys ``first:last``."""

    heads: slice
    start: int
    stop: int
    first: int
    last: int

    @property
    def rows(self) -> tuple[slice, ...]:
        """The index of the query rows in [B*Hkv, R, T]."""
        return self.heads, slice(None), slice(self.start, self.stop)


class Blocks:
    """Queries [B*Hkv, R, T, D], keys and values [B*Hkv, n + S, ...], and the loop over steps.

    The ``n`` global keys come first, as copies. Before the range of a step they are seen as copies,
    within the range as themselves.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        coefficients: Tensor | None,
        mask: Tensor | None,
        spec: AttentionSpec,
        causal: bool,
        block: int = BLOCK,
    ) -> None:
        self.spec, self.causal = spec, causal
        self.scale, self.dtype = spec.score_scale(q.shape[-1]), compute_dtype(q.dtype)
        self.queries, self.kv_heads, self.keys = q.shape[2], k.shape[1], k.shape[2]
        self.groups = q.shape[1] // self.kv_heads
        self.past = self.keys - self.queries  # position of the first query
        self.window = spec.hiding_window
        self.copies = min(spec.global_keys, self.keys) if self.window else 0
        if self.copies:
            self._find_global_keys(mask, q.shape[0], q.device)
        self.q = self.grouped(q)
        self.k, self.v = (self.with_copies(x.to(self.dtype)) for x in (k, v))
        self.total = None if log_decay is None else self.with_copies(log_decay.cumsum(2))
        self.by_channel = spec.decay == "channel"
        self.coefficients = None
        if coefficients is not None:  # [B*Hkv, R, 1, 1, N + 1]
            each = coefficients.to(self.dtype).unflatten(0, (-1, self.groups))
            self.coefficients = each[:, :, None, None].repeat(len(q), 1, 1, 1, 1)
        self.mask = mask
        # Whether a row's last visible key has not faded: hidden keys decay nothing.
        self.fresh = mask is None or mask.shape[1] == mask.shape[2] == 1
        if mask is not None:  # [B, Hkv, R or 1, T or 1, n + S or 1]
            heads = (self.kv_heads, self.groups) if mask.shape[1] > 1 else (1, 1)
            mask = mask.unflatten(1, heads).expand(len(q), self.kv_heads, -1, -1, -1)
            if self.copies and mask.shape[-1] > 1:
                index = self.copied[:, None, None, None].expand(*mask.shape[:-1], -1)
                mask = torch.cat([mask.gather(-1, index), mask], -1)
            self.mask = mask
        self.block = block_length(spec, block)
        self.future = torch.ones(self.block, self.block, dtype=torch.bool, device=q.device).triu(1)

    def _find_global_keys(self, mask: Tensor | None, batch: int, device: torch.device) -> None:
        shown = first_visible(mask, self.keys, self.copies, device).expand(batch, -1)
        self.copied, found = first_positions(shown, self.copies)
        # There may be fewer visible keys; the others are hidden as keys after every range.
        position = self.copied.masked_fill(~found, self.keys)
        self.position, self.is_global = (
            x.repeat_interleave(self.kv_heads, 0) for x in (position, shown)
        )

    def grouped(self, x: Tensor) -> Tensor:
        """[B, H, T, ...] -> [B*Hkv, R, T, ...]: the query heads of one key head are adjacent."""
        return x.unflatten(1, (-1, self.groups)).flatten(0, 1)

    def with_copies(self, x: Tensor) -> Tensor:
        """[B, Hkv, S, ...] -> [B*Hkv, n + S, ...]."""
        if self.copies:
            x = torch.cat([x.gather(2, self._copied_from(x)), x], 2)
        return x.flatten(0, 1)

    def without_copies(self, dx: Tensor) -> Tensor:
        """The adjoint of ``with_copies``: what copies received is added to their keys."""
        dx = dx.unflatten(0, (-1, self.kv_heads))
        copies, rest = dx[:, :, : self.copies], dx[:, :, self.copies :]
        return rest.scatter_add(2, self._copied_from(dx), copies) if self.copies else rest

    def _copied_from(self, x: Tensor) -> Tensor:
        index = self.copied.view(len(x), 1, self.copies, *[1] * (x.ndim - 3))
        return index.expand(-1, x.shape[1], -1, *x.shape[3:])

    def __iter__(self) -> Iterator[Step]:
        every = _GPU_SCORES if self.q.device.type != "cpu" else _CPU_SCORES
        for start, firsts in zip(range(0, self.queries, self.block), self.firsts(), strict=True):
            stop = min(start + self.block, self.queries)
            last = stop + self.past if self.causal else self.keys
            budget = every // (self.groups * (stop - start))
            begin = 0
            while begin < len(firsts):
                first, end = firsts[begin], begin + 1
                needed = last - first
                while end < len(firsts):
                    lower = min(first, firsts[end])
                    computed = (end + 1 - begin) * (last - lower)
                    needed += last - firsts[end]
                    if computed > budget or computed > _WASTE * needed + self.block:
                        break
                    first, end = lower, end + 1
                yield Step(slice(begin, end), start, stop, first, last)
                begin = end

    def firsts(self) -> list[list[int]]:
        """The first key that each block needs, for each head."""
        starts = range(self.past, self.keys, self.block)  # positions of the blocks' first queries
        by_window = [max(0, start - self.window + 1) if self.window else 0 for start in starts]
        unknown = self.total is None or self.by_channel or no_data(self.q)
        if unknown or (self.spec.shifted and not self.fresh):
            return [[first] * len(self.q) for first in by_window]
        assert self.total is not None
        faded = -self.total[:, self.copies :]
        reach: Tensor | float = -FLOOR[self.dtype]
        if self.spec.shifted:
            # Weights are relative to a row's largest, at least that of its last visible key.
            # Scores differ by at most twice the product of the lengths.
            # In the dtype of sums of decays, as squares of small numbers would underflow.
            norm = functools.partial(torch.linalg.vector_norm, dim=-1, dtype=faded.dtype)
            longest, lengths = norm(self.k).amax(-1, keepdim=True), norm(self.q).amax(1)
            lengths = torch.stack([part.amax(-1) for part in lengths.split(self.block, -1)], -1)
            bound = abs(self.scale) * lengths * longest
            reach = reach + 1.0 + 2.01 * bound.nan_to_num(nan=torch.inf)
        latest = (faded[:, self.past :: self.block] - reach).contiguous()
        # From a NaN on, every sum is NaN, and rows need all keys.
        faded = faded.contiguous().masked_fill(faded.isnan(), torch.inf)
        latest = latest.masked_fill_(latest.isnan(), -torch.inf)
        by_decay = torch.searchsorted(faded, latest).t().tolist()
        pairs = zip(by_window, by_decay, strict=True)
        return [[max(window, first) for first in firsts] for window, firsts in pairs]

    def at(self, x: Tensor, step: Step, dim: int = 1) -> Tensor:
        """The keys of a step, the copies first, in ``x`` [heads, ..., n + S, ...]."""
        begin, length = self.copies + step.first, step.last - step.first
        rest = x.narrow(dim, begin, length)
        return torch.cat([x.narrow(dim, 0, self.copies), rest], dim) if self.copies else rest

    def add(self, total: Tensor, step: Step, dx: Tensor) -> None:
        """Add a step's gradient of its keys to that of all, [B*Hkv, n + S, ...]."""
        total = total[step.heads]
        total[:, : self.copies] += dx[:, : self.copies]
        total[:, self.copies + step.first : self.copies + step.last] += dx[:, self.copies :]

    def rows(self, x: Tensor, step: Step) -> Tensor:
        """A block of query rows of ``x`` [B*Hkv, R, T, D]."""
        return x[step.rows].to(self.dtype)

    def scores(self, step: Step) -> Tensor:
        """The scaled scores [heads, R, rows, keys], before clamp and mask."""
        q, k = self.rows(self.q, step) * self.scale, self.at(self.k[step.heads], step)
        if self.by_channel:
            assert self.total is not None
            return channel_scores(q, k, self.at(self.total[step.heads], step))
        return (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])

    def gradients(self, dscores: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """The gradients of the query rows and keys of a step from those of its scores."""
        q, k = self.rows(self.q, step) * self.scale, self.at(self.k[step.heads], step)
        if self.by_channel:
            assert self.total is not None
            total = self.at(self.total[step.heads], step)
            dq, dk = channel_gradients(dscores, q, k, total)
        else:
            dx = dscores.flatten(1, 2)
            dq, dk = (dx @ k).view_as(q), dx.mT @ q.flatten(1, 2)
        return dq.mul_(self.scale), dk

    def fading(self, step: Step) -> Tensor | None:
        """``G_t - G_s`` of a step's weights, [heads, 1, rows, keys]; ``None`` for 0."""
        if self.total is None or self.by_channel:
            return None
        keys = self.at(self.total[step.heads], step)
        rows = step.stop - step.start
        own = keys[:, keys.shape[1] - rows :]
        # Both parts are <= 0, so that their sum in float32 is precise for every key before the
        # block; differences within the block need float64.
        reference = own[:, :1]
        to_row, to_key = own - reference, (reference - keys).clamp(max=0.0)
        fading = to_row.to(self.dtype).unsqueeze(2) + to_key.to(self.dtype).unsqueeze(1)
        fading[..., keys.shape[1] - rows :] = (own.unsqueeze(2) - own.unsqueeze(1)).clamp(max=0.0)
        return fading.unsqueeze(1)

    def series(self, step: Step) -> PowerSeries:
        """The weight series of a step's heads."""
        each = None if self.coefficients is None else self.coefficients[step.heads]
        return PowerSeries.from_spec(self.spec, each)

    def hide(self, x: Tensor, step: Step, value: float) -> Tensor:
        """Fill the invisible keys of each row of ``x`` [heads, R, rows, keys], in place."""
        rows = step.stop - step.start
        if self.causal:
            x[..., x.shape[-1] - rows :].masked_fill_(self.future[:rows, :rows], value)
        if self.window:
            self._hide_outside(x, step, self.window, value)
        if self.mask is not None:
            x.masked_fill_(~self.block_mask(self.mask, step), value)
        return x

    def _hide_outside(self, x: Tensor, step: Step, window: int, value: float) -> None:
        keys = step.last - window - step.first  # this many are outside the window of some row
        if keys > 0:
            start = step.start + self.past - window - step.first
            shape = step.stop - step.start, keys
            outside = torch.ones(shape, dtype=torch.bool, device=x.device).tril(start)
            if self.copies:
                kept = self.is_global[step.heads, step.first : step.first + keys]
                outside = outside & ~kept[:, None, None]
            x[..., self.copies : self.copies + keys].masked_fill_(outside, value)
        if self.copies:
            within = self.position[step.heads] >= step.first
            x[..., : self.copies].masked_fill_(within[:, None, None], value)

    def block_mask(self, mask: Tensor, step: Step) -> Tensor:
        """The part of the mask for one step, broadcastable to [heads, R, rows, keys]."""
        if mask.shape[-2] > 1:
            mask = mask[..., step.start : step.stop, :]
        if mask.shape[-1] > 1:
            mask = self.at(mask, step, dim=-1)
        heads = torch.arange(*step.heads.indices(len(self.q)), device=mask.device)
        return mask[heads // self.kv_heads, heads % self.kv_heads]
