"""Rows of a synthetic task, drawn when they are read: no file, and new rows in every step."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from softmax_rnn._utils.integrity import sha256
from softmax_rnn.data.draws import mix
from softmax_rnn.data.manifest import SPLITS
from softmax_rnn.data.rows import Rows
from softmax_rnn.data.task_base import Task

TEST_ROWS = 512
_SPLITS = (*SPLITS, "validation")
_HASHED_ROWS = 64  # of each split, so that a changed definition is noticed


class TaskRows(Rows):
    """The rows of a split; ``train`` has one per position, ``test`` and ``validation`` few.

    A row is a pure function of (split, seed, position). So variants see the same rows, and a
    resumed run continues with the next one. Without ``causal``, an answer is the label of the token
    that asks for it, and not of the next one.
    """

    def __init__(self, task: Task, split: str, seed: int, causal: bool = True) -> None:
        self.task, self.split, self.seed, self.causal = task, split, seed, causal

    def __len__(self) -> int:
        return 2**62 if self.split == "train" else TEST_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")
        if self.split != "train":  # read in every evaluation
            return dict(self._all[index])
        return self.drawn_rows(self.seed, index, index + 1)[0]

    @functools.cached_property
    def _all(self) -> list[dict[str, Tensor]]:
        return self.drawn_rows(self.seed, 0, len(self))

    def drawn(self, seed: int, position: int) -> int:
        """The position itself: no row is drawn twice."""
        self._check(seed)
        return position

    def drawn_tokens(self, seed: int, start: int, stop: int) -> int:
        """Number of tokens at the positions from ``start`` to ``stop``."""
        return (stop - start) * self.task.block_size

    def drawn_rows(self, seed: int, start: int, stop: int) -> list[dict[str, Tensor]]:
        """The rows at the positions from ``start`` to ``stop``, drawn together."""
        ids, labels = map(torch.from_numpy, self.arrays(seed, np.arange(start, stop)))
        return [
            {"input_ids": row, "labels": answers} for row, answers in zip(ids, labels, strict=True)
        ]

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """As in :class:`Rows`."""
        return self.task.lengths(self._key(self.seed), rows)

    def predicted(self, seed: int, start: int, stop: int) -> int:
        """Number of tokens that these rows ask for."""
        return int(self.task.predicted(self._key(seed), np.arange(start, stop)).sum())

    def arrays(self, seed: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Token ids and labels of the rows at ``positions``, each [N, T]."""
        ids, labels = self.task.draw(self._key(seed), positions)
        return ids, labels if self.causal else np.roll(labels, -1, axis=1)  # the first is -100

    def _key(self, seed: int) -> int:
        self._check(seed)
        return int(mix(_SPLITS.index(self.split), seed)[0] >> np.uint64(1))

    def _check(self, seed: int) -> None:
        if seed != self.seed:
            raise ValueError(f"These rows are drawn with seed {self.seed}, not {seed}.")


@dataclass
class TaskCorpus:
    """A task in place of a prepared corpus.

    Attributes:
        manifest: its text, the size of its vocabulary, and for each split a number of tokens (of
            ``test``; ``train`` has no end, and 0) and a hash.
    """

    manifest: dict[str, Any]

    @classmethod
    def of(cls, task: Task, test: TaskRows) -> TaskCorpus:
        """The manifest of a task with these test rows."""
        train = TaskRows(task, "train", 0)
        manifest = {
            "corpus": str(task),
            "vocab_size": task.vocab_size,
            "end_of_text": None,
            "train": {"tokens": 0, "sha256": _hash(train)},
            "test": {"tokens": len(test) * test.task.block_size, "sha256": _hash(test)},
        }
        return cls(manifest)

    def check_unchanged(self) -> None:
        """Do nothing: there is no file that could change."""


def _hash(rows: TaskRows) -> str:
    arrays = rows.arrays(rows.seed, np.arange(_HASHED_ROWS))
    return sha256(str(rows.task).encode() + b"".join(array.tobytes() for array in arrays))


@functools.lru_cache(maxsize=1)
def task_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token ids as words: ``"3 77 5"`` is the ids 3, 77, 5; other words are errors."""
    vocabulary = {str(number): number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.name_or_path = "task"
    return fast
