"""Where documents come from: local files, or a dataset of the Hugging Face Hub, streamed.

A source is read from a bookmark: plain data that says where to start and how many passages lie
before. It may lie some passages before the place that is wanted; those are read and left out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from softmax_rnn.data.corpus import CorpusError, corpus_files, is_text, read_passages

HUB = "hf:"
_ROWS = 256  # rows of a dataset read at once
_FEW_FILES = 20

Bookmark = dict[str, Any]


class Part(NamedTuple):
    """A passage in its place.

    Attributes:
        text: never empty.
        ends: whether the document ends with it.
        bookmark: where to read from to come to it again.
        share: share of the split that was read by then; None if its size is not known.
    """

    text: str
    ends: bool
    bookmark: Bookmark
    share: float | None


class Source(Protocol):
    """A corpus that can be read."""

    identity: list[Any]  # what tells this text from other text of the same name
    by_passages: bool  # so few documents that passages are drawn for the test split

    def open(self, pinned: dict[str, Any]) -> dict[str, Any]:
        """Find the text, as it was when ``pinned`` was returned; plain data for the manifest."""

    def splits(self) -> dict[str, str]:
        """The source's names of ``train`` and, if it has a split of its own for it, ``test``."""

    def read(self, split: str, bookmark: Bookmark | None) -> Iterator[Part]:
        """The passages of a split from a bookmark on, or all."""


def find_source(corpus: str, text_column: str) -> Source:
    """The source that a corpus name means; ``hf:owner/name@config`` is not yet asked for."""
    if corpus.startswith(HUB):
        return HubSource(corpus, text_column)
    return LocalSource(corpus, text_column)


class LocalSource:
    """Files. See :func:`softmax_rnn.data.corpus.corpus_files`."""

    def __init__(self, corpus: str, text_column: str) -> None:
        self.files, self.column = corpus_files(corpus), text_column
        stats = [(str(path.resolve()), path.stat()) for path in self.files]
        self.identity: list[Any] = [[name, s.st_size, s.st_mtime_ns] for name, s in stats]
        self.by_passages = len(self.files) < _FEW_FILES and all(map(is_text, self.files))

    def open(self, pinned: dict[str, Any]) -> dict[str, Any]:
        """The number of files."""
        return {"files": len(self.files)}

    def splits(self) -> dict[str, str]:
        """Files have no split of their own."""
        return {"train": "train"}

    def read(self, split: str, bookmark: Bookmark | None) -> Iterator[Part]:
        """Every file in turn; a bookmark is the start of a file."""
        first, passages = (bookmark["file"], bookmark["parts"]) if bookmark else (0, 0)
        total, done = sum(size for _, size, _ in self.identity), 0
        for index, (path, (_, size, _)) in enumerate(zip(self.files, self.identity, strict=True)):
            here = {"file": index, "parts": passages}
            for text, ends, share in read_passages(path, self.column) if index >= first else ():
                if text:
                    passages += 1
                    yield Part(text, ends, here, (done + share * size) / total)
            done += size


class HubSource:
    """A dataset of the Hugging Face Hub, streamed: nothing of it is kept but its tokens."""

    def __init__(self, corpus: str, text_column: str) -> None:
        self.corpus, self.column = corpus, text_column
        self.name, _, config = corpus.removeprefix(HUB).partition("@")
        self.config = config or None
        self.identity: list[Any] = []  # asking for it would take a network each time
        self.by_passages = False
        self._splits: Any = None
        if not self.name:
            raise CorpusError(f"{corpus!r} names no dataset: give 'hf:owner/name[@config]'.")

    def open(self, pinned: dict[str, Any]) -> dict[str, Any]:
        """The commit of the dataset, so that a preparation that goes on reads the same text."""
        from datasets import load_dataset  # half a second that local corpora need not wait

        revision = pinned["revision"] if pinned else self._revision()
        try:
            self._splits = load_dataset(self.name, self.config, revision=revision, streaming=True)
        except Exception as error:  # of the Hub, of readers, of scripts
            raise CorpusError(self._cannot_load(error)) from error
        return {"revision": revision, "splits": self.splits()}

    def splits(self) -> dict[str, str]:
        """``train`` or the only split; ``test`` or ``validation``, if there is one."""
        names = list(self._splits)
        train = "train" if "train" in names or len(names) != 1 else names[0]
        if train not in names:
            raise CorpusError(
                f"The dataset {self.corpus!r} has no split 'train' (found: {', '.join(names)})."
            )
        test = next((name for name in ("test", "validation") if name in names), train)
        return {"train": train} if test == train else {"train": train, "test": test}

    def read(self, split: str, bookmark: Bookmark | None) -> Iterator[Part]:
        """The rows in the dataset's order; those without text are left out."""
        from datasets import __version__ as version

        rows = self._splits[split]
        self._check_column(rows.column_names)
        if rows.column_names is not None:
            rows = rows.select_columns([self.column])
        rows, passages, read = rows.with_format("arrow"), 0, 0
        # Another version may understand its state in another way: then from the start.
        if bookmark and bookmark["datasets"] == version:
            rows.load_state_dict(bookmark["state"])
            passages, read = bookmark["parts"], bookmark["rows"]
        known = (rows.info.splits or {}).get(split)
        count = known.num_examples if known is not None else None
        here = {"datasets": version, "state": rows.state_dict(), "parts": passages, "rows": read}
        batches = rows.iter(batch_size=_ROWS)
        while (batch := self._next(batches)) is not None:
            self._check_column(batch.column_names)
            for text in batch.column(self.column).to_pylist():
                read += 1
                if text is not None and not isinstance(text, str):
                    raise CorpusError(
                        f"{self.corpus}: column {self.column!r} holds {type(text).__name__}, "
                        "not text; name another with --text_column."
                    )
                if text:
                    passages += 1
                    yield Part(text, True, here, min(read / count, 1.0) if count else None)
            state = rows.state_dict()
            here = {"datasets": version, "state": state, "parts": passages, "rows": read}

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, None)
        except Exception as error:  # a lost connection, a damaged file
            raise CorpusError(
                f"Cannot read on in the dataset {self.corpus!r}: {type(error).__name__}: {error}. "
                "Rerun the same command to resume."
            ) from error

    def _check_column(self, names: list[str] | None) -> None:
        if names is not None and self.column not in names:
            raise CorpusError(
                f"The dataset {self.corpus!r} has no column {self.column!r} (found: "
                f"{', '.join(names)}); name it with --text_column."
            )

    def _revision(self) -> str | None:
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.name, timeout=10).sha
        except Exception:  # not there, or out of reach: load_dataset knows more
            return None

    def _cannot_load(self, error: Exception) -> str:
        from datasets import get_dataset_config_names
        from datasets.exceptions import DatasetNotFoundError
        from huggingface_hub import HfApi

        message = f"Cannot load the dataset {self.corpus!r}: {error}"
        owner = self.name.partition("/")[0]
        try:
            if isinstance(error, DatasetNotFoundError):
                found = [info.id for info in HfApi().list_datasets(author=owner, limit=500)]
                wanted, what = self.name, "of this owner"
            elif isinstance(error, ValueError):
                found = get_dataset_config_names(self.name)
                wanted, what = self.config or "", "configs"
                if wanted in found:
                    return message
            else:
                return message
        except Exception:  # listing is a courtesy
            return message
        near = difflib.get_close_matches(wanted, found, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{message}{hint} Found {what}: {', '.join(found[:20]) or 'none'}."


def is_prepared(corpus: str) -> bool:
    """Whether the name is the folder of a prepared corpus."""
    manifest = Path(corpus) / "manifest.json"
    if not corpus or not manifest.is_file():
        return False
    if manifest.with_name("train-00000.idx").is_file():
        return True  # whatever has become of the manifest
    try:
        return "end_of_text" in json.loads(manifest.read_text(encoding="utf-8"))
    except (ValueError, TypeError, RecursionError):
        return False  # another file of that name, among the texts
