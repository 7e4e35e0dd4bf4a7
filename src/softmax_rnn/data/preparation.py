"""The steps from a source to a folder of shards; each can be interrupted."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softmax_rnn._utils.files import write_json
from softmax_rnn.data.corpus import CorpusError
from softmax_rnn.data.draws import held_out
from softmax_rnn.data.encoding import Encoded, Encoder, chunks, encode_all
from softmax_rnn.data.manifest import SPLITS, split_hash
from softmax_rnn.data.progress import Progress
from softmax_rnn.data.shards import Journal, read_sealed, write_sealed
from softmax_rnn.data.source import Part, Source

# A corpus with less text is split when all of it is known: the share of its documents is exact,
# and with few of them passages of the token stream are held out in their place.
_SMALL = 2**26  # characters
_FEW_DOCUMENTS = 20
_PASSAGES = 100


@dataclass
class _Place:
    """How far a split of the source was read."""

    parts: int = 0
    documents: int = 0
    tokens: int = 0
    bookmark: dict[str, Any] | None = None


@dataclass
class Preparation:
    """One corpus on its way to a folder."""

    source: Source
    encoder: Encoder
    about: dict[str, Any]
    workers: int
    progress: Callable[[Progress], None]
    unit: str = "documents"
    started: float = field(default_factory=time.perf_counter)
    before: int = 0  # tokens of earlier sessions
    journal: Journal = field(init=False)

    def run(self, folder: Path) -> None:
        """Fill the folder, its manifest last."""
        if not (folder / "manifest.json").exists():  # else killed before the folder had its name
            self._fill(folder)
        for path in (*folder.glob("stretch-*.json"), folder / "source.json"):
            path.unlink(missing_ok=True)  # the manifest takes their place

    def _fill(self, folder: Path) -> None:
        pinned_file = folder / "source.json"
        self.journal = Journal(folder, self.encoder.dtype)
        known = read_sealed(pinned_file) if pinned_file.exists() else {}
        if known is None and self.journal.records:  # of which text, nobody knows
            raise CorpusError(
                f"{pinned_file} is damaged: delete the folder {folder}, to prepare the corpus "
                f"{self.about['corpus']!r} from its start."
            )
        pinned = self.source.open(known or {})
        write_sealed(pinned_file, pinned)
        self.before = self.journal.total_tokens
        splits = self.source.splits()
        try:
            if "test" in splits:
                limit = self.about["max_tokens"]
                few = None if limit is None else math.ceil(limit * self.about["test_fraction"])
                self._stream("test", splits["test"], lambda n: np.ones(len(n), bool), few)
                self._stream("train", splits["train"], lambda n: np.zeros(len(n), bool), limit)
            else:
                self._draw_and_stream(splits["train"])
        finally:
            self.journal.discard()
        try:
            counts = {split: self._counts(split) for split in SPLITS}
        except CorpusError:
            for path in folder.glob("stretch-*.json"):
                path.unlink()  # nothing to go on from
            raise
        write_json(
            folder / "manifest.json",
            {**self.about, **counts, "dtype": self.encoder.dtype, "source": pinned},
        )

    def _draw_and_stream(self, split: str) -> None:
        """A split of whose documents some are to be held out."""
        parts: Iterable[Part] | None = None
        if all(record["phase"] == "all" for record in self.journal.records):
            self.journal.records.clear()  # a small corpus is made in one go
            coming = iter(self.source.read(split, None))
            beginning = list(_up_to(coming, _SMALL))
            if sum(len(part.text) for part in beginning) < _SMALL:
                self._at_once(beginning)
                return
            parts = itertools.chain(beginning, coming)
        if self.source.by_passages:
            self.unit = "passages"
        seed, share = self.about["split_seed"], self.about["test_fraction"]
        limit = self.about["max_tokens"]
        self._stream("train", split, lambda n: held_out(seed, share, n), limit, parts)

    def _at_once(self, parts: list[Part]) -> None:
        """A small corpus: all its documents are tokenised, then some are held out."""
        ids, lengths = self._encode_documents(parts)
        limit = self.about["max_tokens"]
        if limit is not None:
            lengths = lengths[: np.searchsorted(np.cumsum(lengths), limit) + 1]
            ids = ids[: lengths.sum()]
        if len(lengths) < _FEW_DOCUMENTS:
            self.unit = "passages"
            ids = ids[:limit]
            cuts = np.linspace(0, len(ids), _PASSAGES + 1).astype(np.int64)
            lengths = cuts[1:] - cuts[:-1]
            lengths = lengths[lengths > 0]
        count = max(1, round(self.about["test_fraction"] * len(lengths)))
        draw = np.random.default_rng(self.about["split_seed"])
        test = np.zeros(len(lengths), dtype=bool)
        if len(test):
            test[draw.choice(len(test), min(count, len(test) - 1), replace=False)] = True
        place = _Place()
        self._write((ids, lengths), test, np.ones_like(test), [{}] * len(test), place, "all", None)
        self.journal.commit(phase="all", done=True)

    def _encode_documents(self, parts: list[Part]) -> Encoded:
        ends = [index + 1 for index, part in enumerate(parts) if part.ends]
        texts = ["".join(p.text for p in parts[a:b]) for a, b in itertools.pairwise([0, *ends])]
        total, characters, tokens, encoded = sum(map(len, texts)), 0, 0, []
        work = chunks(Part(text, True, {}, None) for text in texts)
        with contextlib.closing(encode_all(self.encoder, work, self.workers)) as results:
            for chunk, found in results:
                encoded.append(found)
                characters += sum(len(part.text) for part in chunk)
                tokens += len(found[0])
                self._report(characters / total, tokens)
        if not encoded:
            raise self._too_little()
        ids, lengths = (np.concatenate(arrays) for arrays in zip(*encoded, strict=True))
        return ids, lengths

    def _stream(
        self,
        phase: str,
        split: str,
        is_test: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
        limit: int | None,
        parts: Iterable[Part] | None = None,
    ) -> None:
        """A split of the source, from where the journal says."""
        done = [record for record in self.journal.records if record["phase"] == phase]
        if done and done[-1]["done"]:
            return
        place = _Place(**done[-1]["place"]) if done else _Place()
        other = self.journal.total_tokens - place.tokens
        work = chunks(_from(self.source, split, place) if parts is None else parts)
        with contextlib.closing(encode_all(self.encoder, work, self.workers)) as results:
            for chunk, encoded in results:
                ends = np.array([part.ends for part in chunk])
                # Passages or whole documents are drawn; every passage of a document shares a lot.
                numbers = place.documents + np.cumsum(ends) - ends
                if self.unit == "passages":
                    numbers = place.parts + np.arange(len(chunk))
                marks = [part.bookmark for part in chunk]
                self._write(encoded, is_test(numbers), ends, marks, place, phase, limit)
                shares = [chunk[-1].share, place.tokens / limit if limit is not None else None]
                known = [min(share, 1.0) for share in shares if share is not None]
                self._report(
                    max(known, default=None) if phase == "train" else None, other + place.tokens
                )
                if limit is not None and place.tokens >= limit:
                    break
        self.journal.commit(phase=phase, done=True, place=dict(vars(place)))

    def _write(
        self,
        encoded: Encoded,
        test: NDArray[np.bool_],
        ends: NDArray[np.bool_],
        bookmarks: list[dict[str, Any]],
        place: _Place,
        phase: str,
        limit: int | None,
    ) -> None:
        """Write passages, cut where a shard is full and where ``limit`` is reached."""
        ids, lengths = encoded
        edges = np.concatenate([[0], np.cumsum(lengths)])
        first = 0
        while first < len(lengths) and (limit is None or place.tokens < limit):
            room = self.about["shard_tokens"] - self.journal.tokens
            if limit is not None:
                room = min(room, limit - place.tokens)
            last = min(int(np.searchsorted(edges, edges[first] + room)), len(lengths))
            cut = slice(first, last)
            self.journal.add(ids[edges[first] : edges[last]], lengths[cut], test[cut])
            place.tokens += int(edges[last] - edges[first])
            place.parts += last - first
            place.documents += int(ends[cut].sum())
            place.bookmark = bookmarks[last - 1]
            if self.journal.tokens >= self.about["shard_tokens"]:
                self.journal.commit(phase=phase, done=False, place=dict(vars(place)))
            first = last

    def _counts(self, split: str) -> dict[str, Any]:
        shards = self.journal.shards(split)
        if not shards:
            raise self._too_little(split)
        return {
            self.unit: sum(shard["documents"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "sha256": split_hash(shards),
            "shards": shards,
        }

    def _too_little(self, split: str = "") -> CorpusError:
        what = f"too little text for a {split} split" if split else "no text"
        return CorpusError(f"The corpus {self.about['corpus']!r} holds {what}.")

    def _report(self, share: float | None, tokens: int) -> None:
        seconds = time.perf_counter() - self.started
        self.progress(Progress(share, tokens, (tokens - self.before) / seconds))


def _up_to(parts: Iterator[Part], characters: int) -> Iterator[Part]:
    """The first parts, until they have so many characters."""
    for part in parts:
        yield part
        characters -= len(part.text)
        if characters <= 0:
            return


def _from(source: Source, split: str, place: _Place) -> Iterator[Part]:
    """The passages after a place."""
    number = None
    for part in source.read(split, place.bookmark):
        number = part.bookmark["parts"] if number is None else number
        number += 1
        if number > place.parts:
            yield part
