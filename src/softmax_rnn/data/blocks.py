"""Blocks of tokens, and the order in which training sees them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from softmax_rnn.data.corpus import CorpusError
from softmax_rnn.data.prepare import PreparedCorpus


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
        count = len(tokens) // block_size
        self.blocks: NDArray[Any] = tokens[: count * block_size].reshape(count, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


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
        return self.blocks[int(_permutation(self.seed, epoch, len(self.blocks))[place])]


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)
