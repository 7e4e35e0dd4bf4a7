"""Rows of tokens, and the order in which training sees them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from softmax_rnn.data.corpus import CorpusError
from softmax_rnn.data.draws import scattered, with_replacement
from softmax_rnn.data.manifest import shard_name
from softmax_rnn.data.prepared import PreparedCorpus, TokenStream

_TABLE = 2**24  # with more blocks than this, their order is computed and not kept
IGNORED = -100  # the label of what is not predicted


class BlockArray:
    """A token stream as an array of [blocks, block_size]; the last, shorter block is left out."""

    def __init__(self, stream: TokenStream, block_size: int) -> None:
        self.stream, self.block_size = stream, block_size

    def __len__(self) -> int:
        return len(self.stream) // self.block_size

    def __getitem__(self, index: int | NDArray[Any]) -> NDArray[Any]:
        """[block_size], a view where it lies in one shard; of an array, [n, block_size]."""
        if isinstance(index, np.ndarray):
            return np.stack([self[int(i)] for i in index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"Block {index} of {len(self)}.")
        start = index % len(self) * self.block_size
        return self.stream[start : start + self.block_size]


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """A token stream cut into blocks of ``block_size``; the last, shorter one is left out.

    Raises:
        CorpusError: if the split is shorter than one block.
    """

    def __init__(self, corpus: PreparedCorpus, split: str, block_size: int) -> None:
        tokens = corpus.tokens(split)
        if len(tokens) < block_size:
            other = "smaller" if split == "train" else "larger"
            raise CorpusError(
                f"The {split} split of the corpus {corpus.manifest['corpus']!r} has {len(tokens)} "
                f"tokens, fewer than one block of {block_size}: give more text, a smaller "
                f"--block_size or a {other} --test_fraction."
            )
        self.blocks = BlockArray(tokens, block_size)
        self.corpus, self.split = corpus, split

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index]
        _check_tokens(block, self.corpus, self.split)
        ids = torch.from_numpy(block.astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def sampled(self, seed: int, length: int) -> ShuffledBlocks:
        """What training sees: ``length`` blocks in the order of ``seed``."""
        return ShuffledBlocks(self, seed, length)


class ShuffledBlocks(Dataset[dict[str, Tensor]]):
    """Position ``i`` of training, for as many epochs as ``length`` takes.

    Which block stands at a position is a pure function of (seed, position, number of blocks):
    every variant sees the same blocks in the same order, and a resumed run goes on with the next.
    """

    def __init__(self, blocks: TokenBlocks, seed: int, length: int) -> None:
        self.blocks, self.seed, self.length = blocks, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        epoch, place = divmod(position, len(self.blocks))
        return self.blocks[_place(self.seed, epoch, place, len(self.blocks))]

    def tokens(self, start: int, stop: int) -> int:
        """Tokens of the positions from ``start`` to ``stop``."""
        return (stop - start) * self.blocks.blocks.block_size


class DocumentRows(Dataset[dict[str, Tensor]]):
    """A document a row: cut off after ``block_size`` tokens, or padded on the right to it.

    Padding has the label -100 and 0 in the attention mask. A long text that was prepared in
    passages has a row for each.
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

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens that the rows of these documents have, padding not counted."""
        numbers = np.searchsorted(self.ends, documents, side="right")
        lengths = np.empty(len(documents), dtype=np.int64)
        for number in np.unique(numbers):
            starts, mine = self.starts[number], numbers == number
            places = documents[mine] - self.ends[number] + len(starts)
            last = places + 1 == len(starts)
            size = len(self.shards[number])
            stops = np.where(last, size, starts[np.where(last, 0, places + 1)])
            if (starts[places] < 0).any() or (stops < starts[places]).any() or (stops > size).any():
                raise self.corpus.damaged(f"{shard_name(self.split, int(number))}.idx is no index")
            lengths[mine] = stops - starts[places]
        return np.minimum(lengths, self.block_size)

    def sampled(self, seed: int, length: int) -> SampledDocuments:
        """What training sees: ``length`` rows, drawn with replacement."""
        return SampledDocuments(self, seed, length)


class SampledDocuments(Dataset[dict[str, Tensor]]):
    """Position ``i`` of training: a document drawn by (seed, position), whatever came before."""

    def __init__(self, rows: DocumentRows, seed: int, length: int) -> None:
        self.rows, self.seed, self.length = rows, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self.rows[int(self._documents(position, position + 1)[0])]

    def _documents(self, start: int, stop: int) -> NDArray[np.int64]:
        return with_replacement(self.seed, np.arange(start, stop), len(self.rows))

    def tokens(self, start: int, stop: int) -> int:
        """Tokens of the positions from ``start`` to ``stop``, padding not counted."""
        return int(self.rows.lengths(self._documents(start, stop)).sum())


def _check_tokens(tokens: NDArray[Any], corpus: PreparedCorpus, split: str) -> None:
    rows, largest = corpus.manifest["vocab_size"], tokens.max(initial=0)
    if largest >= rows:
        raise corpus.damaged(f"a shard of its {split} split holds the id {largest} of {rows} ids")


Rows = TokenBlocks | DocumentRows


def _place(seed: int, epoch: int, place: int, count: int) -> int:
    if count > _TABLE:
        return scattered(seed, epoch, place, count)
    return int(_permutation(seed, epoch, count)[place])


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)
