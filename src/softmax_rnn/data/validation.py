"""Documents of the training split in place of the test split, for the choice of settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softmax_rnn._utils.integrity import sha256
from softmax_rnn.data.draws import held_out, mix
from softmax_rnn.data.readers import CorpusError
from softmax_rnn.data.shards import PreparedCorpus


@dataclass
class ValidationCorpus(PreparedCorpus):
    """A prepared corpus whose test split is a part of its training split.

    The corpus's own test split is not read. Training never sees the documents that are held out
    here. Nothing is written: both splits are views of the shards of the training split.
    """

    @classmethod
    def of(cls, corpus: PreparedCorpus, fraction: float, seed: int) -> ValidationCorpus:
        """Hold out ``fraction`` of the training documents (or passages), drawn with ``seed``.

        Raises:
            CorpusError: if the training split is a single document.
        """
        found = cls(corpus.folder, corpus.manifest)
        held = found._draw(fraction, seed)
        found._held = np.split(held, np.cumsum([len(starts) for starts in found._starts])[:-1])
        counts = {split: found._counts(split) for split in ("train", "test")}
        found.manifest = {**corpus.manifest, **counts}
        return found

    def __post_init__(self) -> None:
        self._held: list[NDArray[np.bool_]] = []  # of each shard: the documents that are held out

    @cached_property
    def _starts(self) -> list[NDArray[np.int64]]:
        return super().maps("train", ".idx", "int64")

    def _draw(self, fraction: float, seed: int) -> NDArray[np.bool_]:
        numbers = np.arange(sum(map(len, self._starts)))
        if len(numbers) < 2:
            raise CorpusError(
                f"The training split of the corpus {self.manifest['corpus']!r} is a single "
                "document: none can be held out for validation."
            )
        held = held_out(seed, fraction, numbers)
        if not held.any():  # fewer documents than the first draw is made of
            held[int(mix(seed)[0] % np.uint64(len(numbers)))] = True
        return held

    def maps(self, split: str, suffix: str, dtype: str) -> list[NDArray[Any]]:
        """As in :class:`PreparedCorpus`, with an array for each run of documents of a split."""
        tokens = super().maps("train", ".bin", self.manifest["dtype"])
        pieces = []
        for shard, starts, held in zip(tokens, self._starts, self._held, strict=True):
            edges = np.append(starts, len(shard))
            if (np.diff(edges) < 0).any() or edges[0]:
                raise self.damaged("an index of its train split is not valid")
            wanted = held if split == "test" else ~held
            first, last = (
                np.flatnonzero(np.diff(np.pad(wanted, 1).astype(np.int8))).reshape(-1, 2).T
            )
            for start, stop in zip(first, last, strict=True):
                piece = starts[start:stop] - starts[start]
                pieces.append(piece if suffix == ".idx" else shard[edges[start] : edges[stop]])
        return pieces

    def _counts(self, split: str) -> dict[str, Any]:
        """The entry of a split in the manifest; its shards are those that are read for it."""
        train = self.manifest["train"]
        lengths = [len(piece) for piece in self.maps(split, ".bin", self.manifest["dtype"])]
        held = np.concatenate(self._held)
        unit = "passages" if "passages" in train else "documents"
        return {
            **train,
            unit: int((held if split == "test" else ~held).sum()),
            "tokens": sum(lengths),
            "sha256": sha256(
                f"{split} of {train['sha256']} ".encode() + np.packbits(held).tobytes()
            ),
        }
