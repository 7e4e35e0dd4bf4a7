"""Write the splits of a source as shards: read, tokenise, hold out the test split, write.

A preparation can be interrupted at any moment; the next one resumes after the last finished shard.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softmax_rnn._utils.files import write_json
from softmax_rnn._utils.integrity import MANIFEST, read_sealed, write_sealed
from softmax_rnn.data.draws import held_out
from softmax_rnn.data.manifest import SPLITS, split_hash
from softmax_rnn.data.readers import CorpusError, Passage, documents
from softmax_rnn.data.shards import Journal
from softmax_rnn.data.source import Source
from softmax_rnn.data.tokenise import Encoded, Encoder, chunks, encode_all

# A smaller corpus is split after all of it is tokenised, so that the share of held-out documents is
# exact. If it has few documents, passages of the token stream are held out instead.
_SMALL = 2**26  # characters
_FEW_DOCUMENTS = 20
_PASSAGES = 100


class Progress(NamedTuple):
    """The progress of a preparation."""

    share: float | None  # finished, 0 to 1; None if the size of the corpus is not known
    tokens: int  # written, including those of interrupted calls
    tokens_per_second: float  # of this call
    checking: bool = False  # whether files are still checked, and no token is written


@dataclass
class _Pass:
    """One pass over a split of the source, and its progress."""

    name: str  # train or test; all for a small corpus
    limit: int | None = None  # stops at this number of tokens
    parts: int = 0  # passages
    documents: int = 0
    tokens: int = 0
    bookmark: dict[str, Any] | None = None

    @property
    def full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def record(self, done: bool) -> dict[str, Any]:
        """The journal's record of this pass."""
        place = {key: getattr(self, key) for key in ("parts", "documents", "tokens", "bookmark")}
        return {"phase": self.name, "done": done, "place": place}


@dataclass
class Preparation:
    """A corpus that is being written to a folder."""

    source: Source
    encoder: Encoder
    about: dict[str, Any]  # the part of the manifest that is known beforehand
    workers: int  # threads that tokenise
    progress: Callable[[Progress], None]  # called regularly
    unit: str = field(default="documents", init=False)  # or passages: what is held out
    started: float = field(default_factory=time.perf_counter, init=False)
    earlier_tokens: int = field(default=0, init=False)  # written before this call
    journal: Journal = field(init=False)

    def run(self, folder: Path) -> None:
        """Fill the folder; the manifest is written last."""
        if not (folder / MANIFEST).exists():  # else a call was killed before it renamed the folder
            self._fill(folder)
        for path in (*folder.glob("stretch-*.json"), folder / "source.json"):
            path.unlink(missing_ok=True)  # the manifest replaces them

    def _fill(self, folder: Path) -> None:
        pinned_file = folder / "source.json"
        self.journal = Journal(folder, self.encoder.dtype)
        pinned = read_sealed(pinned_file) if pinned_file.exists() else {}
        if pinned is None and self.journal.records:  # of an unknown version of the text
            raise CorpusError(
                f"{pinned_file} is damaged: delete the folder {folder} to prepare the corpus "
                f"{self.about['corpus']!r} from the start."
            )
        checked = lambda share: self.progress(Progress(share, 0, 0.0, checking=True))  # noqa: E731
        pinned = self.source.open(pinned or {}, checked)
        self.started = time.perf_counter()
        write_sealed(pinned_file, pinned)
        self.earlier_tokens = self.journal.total_tokens
        splits, limit = self.source.splits(), self.about["max_tokens"]
        try:
            if "test" in splits:
                few = None if limit is None else math.ceil(limit * self.about["test_fraction"])
                self._stream(_Pass("test", few), splits["test"], np.ones_like)
                self._stream(_Pass("train", limit), splits["train"], np.zeros_like)
            else:
                self._split_and_write(splits["train"])
        finally:
            self.journal.discard()
        try:
            counts = {split: self._counts(split) for split in SPLITS}
        except CorpusError:
            for path in folder.glob("stretch-*.json"):
                path.unlink()  # nothing to resume
            raise
        write_json(folder / MANIFEST, {**self.about, **counts, "source": pinned})

    def _split_and_write(self, split: str) -> None:
        """Write a split, and hold out some of its documents."""
        passages: Iterable[Passage] | None = None
        if all(record["phase"] == "all" for record in self.journal.records):
            self.journal.records.clear()  # a small corpus is written in one segment
            coming, characters = self.source.read(split, None), 0
            beginning: list[Passage] = []
            for passage in coming:
                beginning.append(passage)
                characters += len(passage.text)
                if characters >= _SMALL:
                    break
            else:
                self._write_small(beginning)
                return
            passages = itertools.chain(beginning, coming)
        if self.source.by_passages:
            self.unit = "passages"
        seed, share = self.about["split_seed"], self.about["test_fraction"]
        step = _Pass("train", self.about["max_tokens"])
        self._stream(step, split, lambda numbers: held_out(seed, share, numbers), passages)

    def _write_small(self, passages: list[Passage]) -> None:
        """Tokenise all documents, then hold out some of them."""
        total = sum(len(passage.text) for passage in passages)
        characters, tokens, encoded = 0, 0, []
        work = chunks(Passage(text, True) for text in documents(passages))
        with contextlib.closing(encode_all(self.encoder, work, self.workers)) as results:
            for chunk, found in results:
                encoded.append(found)
                characters += sum(len(document.text) for document in chunk)
                tokens += len(found[0])
                self._report(characters / total, tokens)
        if not encoded:
            return
        ids, lengths = (np.concatenate(arrays) for arrays in zip(*encoded, strict=True))
        if (limit := self.about["max_tokens"]) is not None:
            lengths = lengths[: np.searchsorted(np.cumsum(lengths), limit) + 1]
            ids = ids[: lengths.sum()]
        if len(lengths) < _FEW_DOCUMENTS:
            self.unit = "passages"
            ids = ids[:limit]
            lengths = np.diff(np.linspace(0, len(ids), _PASSAGES + 1).astype(np.int64))
            lengths = lengths[lengths > 0]
        count = max(1, round(self.about["test_fraction"] * len(lengths)))
        draw = np.random.default_rng(self.about["split_seed"])
        test = np.zeros(len(lengths), dtype=bool)
        test[draw.choice(len(test), min(count, len(test) - 1), replace=False)] = True
        step = _Pass("all")
        self._write(step, [Passage("", True)] * len(test), (ids, lengths), test)
        self.journal.commit(**step.record(done=True))

    def _stream(
        self,
        step: _Pass,
        split: str,
        is_test: Callable[[NDArray[np.int64]], NDArray[Any]],
        passages: Iterable[Passage] | None = None,
    ) -> None:
        """Tokenise and write a split of any size, starting where the journal ends.

        ``is_test`` says whether the documents (or passages) of given numbers are held out;
        ``passages`` are those of the split if it is read from its start.
        """
        records = [record for record in self.journal.records if record["phase"] == step.name]
        if records and records[-1]["done"]:
            return
        if records:
            step = replace(step, **records[-1]["place"])
        work = chunks(self._after(split, step) if passages is None else passages)
        with contextlib.closing(encode_all(self.encoder, work, self.workers)) as results:
            for chunk, encoded in results:
                ends = np.array([passage.ends for passage in chunk])
                numbers = step.documents + np.cumsum(ends) - ends  # one for each document
                if self.unit == "passages":
                    numbers = step.parts + np.arange(len(chunk))
                self._write(step, chunk, encoded, is_test(numbers).astype(bool))
                shares = [chunk[-1].share, step.tokens / step.limit if step.limit else None]
                known = [min(share, 1.0) for share in shares if share is not None]
                share = max(known, default=None) if step.name == "train" else None
                self._report(share, self.journal.total_tokens + self.journal.tokens)
                if step.full:
                    break
        self.journal.commit(**step.record(done=True))

    def _after(self, split: str, step: _Pass) -> Iterator[Passage]:
        """The passages that a pass has not read. Its bookmark may precede them."""
        passages = self.source.read(split, step.bookmark)
        if (first := next(passages, None)) is None:
            return
        assert first.bookmark is not None
        skipped = step.parts - first.bookmark["parts"]
        yield from itertools.islice(itertools.chain([first], passages), skipped, None)

    def _write(
        self, step: _Pass, chunk: list[Passage], encoded: Encoded, test: NDArray[np.bool_]
    ) -> None:
        """Write passages up to the limit; finish a segment wherever a shard is full."""
        ids, lengths = encoded
        shard_tokens = self.about["shard_tokens"]
        edges = np.concatenate([[0], np.cumsum(lengths)])
        first = 0
        while first < len(lengths) and not step.full:
            remaining = shard_tokens - self.journal.tokens
            if step.limit is not None:
                remaining = min(remaining, step.limit - step.tokens)
            last = min(int(np.searchsorted(edges, edges[first] + remaining)), len(lengths))
            cut = slice(first, last)
            self.journal.add(ids[edges[first] : edges[last]], lengths[cut], test[cut])
            step.tokens += int(edges[last] - edges[first])
            step.parts += last - first
            step.documents += sum(passage.ends for passage in chunk[cut])
            step.bookmark = chunk[last - 1].bookmark
            if self.journal.tokens >= shard_tokens:
                self.journal.commit(**step.record(done=False))
            first = last

    def _counts(self, split: str) -> dict[str, Any]:
        shards = self.journal.shards(split)
        if not shards:
            few = f"too little text for a {split} split" if self.journal.total_tokens else "no text"
            raise CorpusError(f"The corpus {self.about['corpus']!r} holds {few}.")
        return {
            self.unit: sum(shard["documents"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "sha256": split_hash(shards),
            "shards": shards,
        }

    def _report(self, share: float | None, tokens: int) -> None:
        seconds = time.perf_counter() - self.started
        self.progress(Progress(share, tokens, (tokens - self.earlier_tokens) / seconds))
