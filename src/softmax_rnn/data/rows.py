"""Rows of tokens for training and testing, and the order in which training reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from softmax_rnn.data.draws import mix, scattered
from softmax_rnn.data.manifest import shard_name
from softmax_rnn.data.readers import CorpusError
from softmax_rnn.data.shards import PreparedCorpus
from softmax_rnn.data.task_base import Stream, distinct

_TABLE = 2**24  # for more blocks, the order is computed for each position separately
_HIDDEN = 0.15  # the share of the tokens that are hidden (Devlin et al. 2018)
IGNORED = -100  # the label of tokens that are not predicted


class Rows(Dataset[dict[str, Tensor]], ABC):
    """The rows of a split. Training reads them by position: the n-th row that it sees."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A row: ``input_ids``, ``labels``, and ``attention_mask`` if it may have padding.

        ``position_ids`` of a row with several documents begin again with each.
        """

    @abstractmethod
    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens in these rows, without padding."""

    @abstractmethod
    def drawn(self, seed: int, position: int) -> int:
        """The row that training reads at ``position``."""

    @abstractmethod
    def drawn_tokens(self, seed: int, start: int, stop: int) -> int:
        """Number of tokens at the positions from ``start`` to ``stop``, without padding."""

    def drawn_rows(self, seed: int, start: int, stop: int) -> list[dict[str, Tensor]]:
        """The rows at the positions from ``start`` to ``stop``."""
        return [self[self.drawn(seed, position)] for position in range(start, stop)]

    def predicted(self, seed: int, start: int, stop: int) -> int:
        """Number of predicted tokens in these rows: all but the first of each."""
        return self.drawn_tokens(seed, start, stop) - (stop - start)


class TokenBlocks(Rows):
    """A token stream cut into blocks of ``block_size``; the last, shorter one is dropped.

    Raises:
        CorpusError: if the split is shorter than one block.
    """

    def __init__(self, corpus: PreparedCorpus, split: str, block_size: int) -> None:
        self.corpus, self.split, self.block_size = corpus, split, block_size
        self.stream = corpus.tokens(split)
        if not len(self):
            other = "smaller" if split == "train" else "larger"
            raise CorpusError(
                f"The {split} split of the corpus {corpus.manifest['corpus']!r} has "
                f"{len(self.stream)} tokens, fewer than one block of {block_size}: give more text, "
                f"a smaller block_size or a {other} test_fraction."
            )

    def __len__(self) -> int:
        return len(self.stream) // self.block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.block(index).astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """As in :class:`Rows`: no block has padding."""
        return np.full(len(rows), self.block_size)

    def block(self, index: int) -> NDArray[Any]:
        """[block_size] token ids; a view if the block is within one shard."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"Block {index} of {len(self)}.")
        start = index % len(self) * self.block_size
        block = self.stream[start : start + self.block_size]
        _check_tokens(block, self.corpus, self.split)
        return block

    def drawn(self, seed: int, position: int) -> int:
        """The block that training reads at ``position``: each block once an epoch.

        It is a pure function of (seed, position, number of blocks): every variant reads the same
        blocks in the same order, and a resumed run continues with the next one.
        """
        count = len(self)
        epoch, place = divmod(position, count)
        if count > _TABLE:
            return scattered(seed, epoch, place, count)
        return int(_permutation(seed, epoch, count)[place])

    def drawn_tokens(self, seed: int, start: int, stop: int) -> int:
        """Number of tokens at the positions from ``start`` to ``stop``."""
        return (stop - start) * self.block_size


class MaskedBlocks(TokenBlocks):
    """The blocks of :class:`TokenBlocks`, in which some tokens are hidden, and alone are predicted.

    In their places is the first id after the vocabulary. In training they are a pure function of
    (seed, position), so that a block has others in each epoch; in evaluation of the block.
    """

    def __init__(self, corpus: PreparedCorpus, split: str, block_size: int) -> None:
        super().__init__(corpus, split, block_size)
        self.hidden = max(1, round(_HIDDEN * block_size))  # of each block

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._masked(0, index % len(self), index)

    def drawn_rows(self, seed: int, start: int, stop: int) -> list[dict[str, Tensor]]:
        """As in :class:`Rows`."""
        rows = range(start, stop)
        return [self._masked(seed, place, self.drawn(seed, place)) for place in rows]

    def _masked(self, seed: int, position: int, index: int) -> dict[str, Tensor]:
        at = np.array([position])
        chosen = torch.from_numpy(
            distinct(self.block_size, seed, Stream.HIDDEN, at, self.hidden)[0]
        )
        ids = super().__getitem__(index)["input_ids"].clone()
        labels = torch.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        ids[chosen] = self.corpus.manifest["vocab_size"]
        return {"input_ids": ids, "labels": labels}

    def predicted(self, seed: int, start: int, stop: int) -> int:
        """As in :class:`Rows`: the hidden tokens."""
        return (stop - start) * self.hidden


class SegmentedBlocks(TokenBlocks):
    """The blocks of :class:`TokenBlocks`, in which no document sees another.

    A document's positions begin at 0, or at the block's first token. Its first token is not
    predicted. A long text that was prepared in passages is as many documents.
    """

    def __init__(self, corpus: PreparedCorpus, split: str, block_size: int) -> None:
        super().__init__(corpus, split, block_size)
        shards = corpus.maps(split, ".bin", corpus.manifest["dtype"])
        starts = corpus.maps(split, ".idx", "int64")
        before = np.cumsum([0, *(len(shard) for shard in shards)])
        own = [first + places for first, places in zip(before[:-1], starts, strict=True)]
        self.starts = np.unique(np.concatenate(own))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        first = index % len(self) * self.block_size
        inner = self.starts[slice(*self._inner(np.array(first)))] - first
        begun = np.zeros(self.block_size, dtype=np.int64)
        begun[inner] = inner
        positions = np.arange(self.block_size) - np.maximum.accumulate(begun)
        labels = row["labels"].clone()
        labels[torch.from_numpy(inner)] = IGNORED
        return {**row, "labels": labels, "position_ids": torch.from_numpy(positions)}

    def _inner(self, first: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places in ``starts`` of the documents that begin inside the blocks from ``first`` on."""
        after = np.searchsorted(self.starts, first, side="right")
        return after, np.searchsorted(self.starts, first + self.block_size, side="left")

    def predicted(self, seed: int, start: int, stop: int) -> int:
        """As in :class:`Rows`: all tokens but the first of each document and block."""
        rows = np.array([self.drawn(seed, position) for position in range(start, stop)])
        low, high = self._inner(rows * self.block_size)
        return super().predicted(seed, start, stop) - int((high - low).sum())


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


class DocumentRows(Rows):
    """One document per row: truncated after ``block_size`` tokens, or padded on the right.

    Padding has the label -100 and 0 in the attention mask. A long text that was prepared in
    passages has one row per passage.
    """

    def __init__(self, corpus: PreparedCorpus, split: str, block_size: int) -> None:
        self.corpus, self.split, self.block_size = corpus, split, block_size
        self.padding = corpus.manifest["end_of_text"]
        self.shards = corpus.maps(split, ".bin", corpus.manifest["dtype"])
        self.starts = corpus.maps(split, ".idx", "int64")
        self.ends = np.cumsum([len(starts) for starts in self.starts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Document {index} of {len(self)}.")
        index %= len(self)
        length = int(self.lengths(np.array([index]))[0])
        number = int(np.searchsorted(self.ends, index, side="right"))
        start = self.starts[number][index - self.ends[number]]  # counted from the end
        tokens = self.shards[number][start : start + length]
        _check_tokens(tokens, self.corpus, self.split)
        ids = torch.full((self.block_size,), self.padding)
        ids[:length] = torch.from_numpy(tokens.astype(np.int64))
        mask = torch.arange(self.block_size) < length
        labels = ids.masked_fill(~mask, IGNORED)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """As in :class:`Rows`."""
        numbers = np.searchsorted(self.ends, rows, side="right")
        lengths = np.empty(len(rows), dtype=np.int64)
        for number in np.unique(numbers):
            starts, mine = self.starts[number], numbers == number
            places = rows[mine] - self.ends[number] + len(starts)
            last = places + 1 == len(starts)
            size = len(self.shards[number])
            stops = np.where(last, size, starts[np.where(last, 0, places + 1)])
            if (starts[places] < 0).any() or (stops < starts[places]).any() or (stops > size).any():
                name = shard_name(self.split, int(number))
                raise self.corpus.damaged(f"{name}.idx is not a valid index")
            lengths[mine] = stops - starts[places]
        return np.minimum(lengths, self.block_size)

    def drawn(self, seed: int, position: int) -> int:
        """The document that training reads at ``position``: drawn with replacement."""
        return int(self._drawn(seed, position, position + 1)[0])

    def drawn_tokens(self, seed: int, start: int, stop: int) -> int:
        """Number of tokens at the positions from ``start`` to ``stop``, without padding."""
        return int(self.lengths(self._drawn(seed, start, stop)).sum())

    def _drawn(self, seed: int, start: int, stop: int) -> NDArray[np.int64]:
        return (mix(seed, np.arange(start, stop)) % np.uint64(len(self))).astype(np.int64)


def _check_tokens(tokens: NDArray[Any], corpus: PreparedCorpus, split: str) -> None:
    rows, largest = corpus.manifest["vocab_size"], tokens.max(initial=0)
    if largest >= rows:
        raise corpus.damaged(f"a shard of its {split} split holds the id {largest} of {rows} ids")
