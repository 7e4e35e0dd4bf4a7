"""Several sequences in one row, none of which sees another.

Each becomes a row of its own, together with others of about its length: whatever an attention
computes of a sequence it computes of a segment, in every form, and nothing is spent on pairs of
different segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softmax_rnn.ops.inputs import Call

# Segments share a batch if the shortest has this share of the tokens of the longest, or if all are
# shorter than a block.
_LEAST_SHARE, _SHORT = 0.75, 32


class _Batch(NamedTuple):
    """Segments of about the same length.

    Attributes:
        tokens: [N, L], places in the flattened rows; those after a segment's end repeat its last.
        real: [N, L], False after a segment's end; ``None`` if all are of length L.
    """

    tokens: Tensor
    real: Tensor | None


class Segments:
    """The batches of the segments of some rows.

    Args:
        ids: integers [B or 1, S]; a segment is a run of equal ones.
        rows: the number of rows B.
    """

    def __init__(self, ids: Tensor, rows: int) -> None:
        self.shape = rows, ids.shape[1]
        known = ids.detach().cpu().numpy()
        known = np.broadcast_to(known, self.shape)
        first = np.ones(self.shape, dtype=bool)
        first[:, 1:] = known[:, 1:] != known[:, :-1]
        starts = np.flatnonzero(first.reshape(-1))
        lengths = np.diff(starts, append=first.size)
        # Where each token is, among those of all batches one after the other.
        places, before = np.empty(first.size, dtype=np.int64), 0
        self.batches: list[_Batch] = []
        order = np.argsort(-lengths, kind="stable")
        while len(order):
            longest = int(lengths[order[0]])
            least = 0 if longest <= _SHORT else _LEAST_SHARE * longest
            count = int((lengths[order] >= least).sum())
            chosen, order = order[:count], order[count:]
            offsets = np.minimum(np.arange(longest), lengths[chosen, None] - 1)
            tokens = starts[chosen, None] + offsets
            real = np.arange(longest) < lengths[chosen, None]
            places[tokens[real]] = before + np.flatnonzero(real.reshape(-1))
            before += tokens.size
            shown = None if real.all() else torch.from_numpy(real).to(ids.device)
            self.batches.append(_Batch(torch.from_numpy(tokens).to(ids.device), shown))
        self._places = torch.from_numpy(places).to(ids.device)

    def split(self, x: Tensor, dim: int) -> list[Any]:
        """``x`` [B or 1, ..., S, ...], whose dimension ``dim`` has S tokens, for each batch."""
        flat = x.expand(self.shape[0], *x.shape[1:]).movedim(dim, 1).flatten(0, 1)
        return [
            flat.index_select(0, batch.tokens.reshape(-1))
            .unflatten(0, batch.tokens.shape)
            .movedim(1, dim)
            for batch in self.batches
        ]

    def split_all(self, tensors: Any, dim: int) -> list[Any]:
        """As :meth:`split`, of a tensor, a sequence of tensors, or ``None``."""
        if tensors is None:
            return [None] * len(self.batches)
        if isinstance(tensors, Tensor):
            return self.split(tensors, dim)
        return list(zip(*(self.split(x, dim) for x in tensors), strict=True))

    def split_mask(self, mask: Tensor | None, causal: bool) -> list[Any]:
        """A mask that is broadcast to [B, H, S, S], for each batch.

        If attention is not ``causal``, it hides what comes after a segment's end.
        """
        parts: list[Tensor | None] = [None] * len(self.batches)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            mask = mask.expand(-1, -1, -1, self.shape[1])
            parts = self.split(mask, 3)
            if mask.shape[2] > 1:
                rows = mask.expand(self.shape[0], -1, -1, -1)
                parts = [_pairs(rows, batch.tokens) for batch in self.batches]
        if causal:
            return parts
        hidden = [None if real is None else real[:, None, None] for _, real in self.batches]
        return [
            x if y is None else y if x is None else x & y
            for x, y in zip(parts, hidden, strict=True)
        ]

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The tokens of all batches in their rows again, the inverse of :meth:`split`."""
        flat = torch.cat([x.movedim(dim, 1).flatten(0, 1) for x in parts])
        return flat.index_select(0, self._places).unflatten(0, self.shape).movedim(1, dim)


def _pairs(mask: Tensor, tokens: Tensor) -> Tensor:
    """The parts [N, H, L, L] of a mask [B, H, S, S] for the segments with these tokens."""
    rows, columns = tokens[:, :1] // mask.shape[3], tokens % mask.shape[3]
    chosen = mask[rows[:, :, None], :, columns[:, :, None], columns[:, None]]
    return chosen.movedim(3, 1)


# The last ids and their segments: all layers of a model get the same ones.
_last: tuple[Tensor, int, Segments] | None = None


def segments_of(ids: Tensor, rows: int) -> Segments:
    """The segments of ``ids`` [B or 1, S], which are known if they were asked for just before."""
    global _last
    if _last is not None:
        known, count, found = _last
        alike = count == rows and known.device == ids.device and known.dtype == ids.dtype
        if alike and torch.equal(known, ids):
            return found
    with torch.inference_mode(False):  # a later call may need gradients
        found = Segments(ids, rows)
        _last = ids.clone(), rows, found
    return found


def check_segments(ids: Any, rows: Tensor, stateful: bool) -> None:
    """Raise ``ValueError`` unless these are segments of rows [B, S, ...]."""
    batch, tokens = rows.shape[:2]
    if not isinstance(ids, Tensor):
        raise ValueError(f"segments must be a torch.Tensor of integers, not {type(ids).__name__}.")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"segments must be integers, one for each token, not {ids.dtype}.")
    if ids.ndim != 2 or ids.shape[1] != tokens or len(ids) not in (1, batch):
        raise ValueError(
            f"segments must be [B or 1, S] = [{batch} or 1, {tokens}], not {list(ids.shape)}."
        )
    if ids.device != rows.device:
        raise ValueError(f"segments are on {ids.device}, the tokens on {rows.device}.")
    if stateful:
        raise ValueError("Rows of several segments have no state: leave state or segments out.")


# The arguments of a call that have a value for each token, in their third dimension.
_QKV = ("q", "k", "v")
_DECAYS = ("log_decay", "backward_log_decay")
_OF_TOKENS = (*_QKV, *_DECAYS, "input_gate", "output_gate", "outside_q", "outside_k")


def calls_of(call: Call, segments: Segments) -> list[Call]:
    """A call for each batch of segments."""
    given = {name: getattr(call, name) for name in _OF_TOKENS}
    divided = {
        name: segments.split(x, 2) for name, x in given.items() if x is not None and x.ndim > 2
    }
    # What is repeated after a segment's end is 0 here: sums over it might overflow.
    ends = [None if real is None else ~real[:, None, :, None] for _, real in segments.batches]
    for name in {"k", "v", "outside_k"} & divided.keys():
        parts = zip(divided[name], ends, strict=True)
        divided[name] = [x if end is None else x.masked_fill(end, 0.0) for x, end in parts]
    divided["mask"] = segments.split_mask(call.mask, call.causal)
    places = range(len(segments.batches))
    each = ({name: parts[place] for name, parts in divided.items()} for place in places)
    return [dataclasses.replace(call, **fields) for fields in each]
