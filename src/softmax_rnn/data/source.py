"""Where documents come from: local files, or a dataset of the Hugging Face Hub, streamed.

A source can start reading at a bookmark: plain data that says where to start and how many passages
precede that place (``parts``). A bookmark may precede the passage that is wanted; the reader skips
the passages in between.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from softmax_rnn._utils.errors import nearest
from softmax_rnn.data.readers import (
    DOCSTRINGS,
    CorpusError,
    Passage,
    corpus_files,
    encodings,
    is_text,
    read_docstrings,
    read_passages,
)

HUB = "hf:"
_ROWS = 256  # rows of a dataset that are read at once
_FEW_FILES = 20
_NAMED = 20  # files in a message

Bookmark = dict[str, Any]


class LocalSource:
    """Files. See :func:`softmax_rnn.data.readers.corpus_files`.

    Args:
        corpus: names the files.
        text_column: key or column of the text.
        encoding: of text and JSON lines; of several names (``utf-8,latin-1``) each file has the
            first one in which it can be read.
        bad_files: ``error``, or ``skip`` to leave out the files that cannot be read.
    """

    def __init__(
        self, corpus: str, text_column: str, encoding: str = "utf-8", bad_files: str = "error"
    ) -> None:
        self.corpus, self.files, self.column = corpus, corpus_files(corpus), text_column
        self.skip, self.encodings = bad_files == "skip", encodings(encoding)
        self.read_file = read_docstrings if corpus == DOCSTRINGS else read_passages
        stats = [(str(path.resolve()), path.stat()) for path in self.files]
        # This changes when the text changes under the same name.
        self.identity: list[Any] = [[name, s.st_size, s.st_mtime_ns] for name, s in stats]
        self.sizes = {path: s.st_size for path, (_, s) in zip(self.files, stats, strict=True)}
        self.other_encodings: dict[str, str] = {}  # of files that do not have the first one

    @property
    def by_passages(self) -> bool:
        """Whether the test split is drawn from passages, since there are few documents."""
        return len(self.files) < _FEW_FILES and all(map(is_text, self.files))

    def open(
        self, pinned: dict[str, Any], progress: Callable[[float], None] = lambda share: None
    ) -> dict[str, Any]:
        """Find the text, in the version of ``pinned`` if it is given; returns what to pin.

        Without ``pinned`` every file is read once, so that all bad ones are found together and
        before any work.

        Args:
            pinned: what an earlier call returned.
            progress: called with the share that has been read.

        Raises:
            CorpusError: if files cannot be read, with the names of all of them.
        """
        found = pinned or self._check(progress)
        self.files = [path for path in self.files if str(path) not in found["skipped"]]
        self.other_encodings = found["encodings"]
        return found

    def _check(self, progress: Callable[[float], None]) -> dict[str, Any]:
        bad: dict[str, str] = {}
        others: dict[str, str] = {}
        done, shown, total = 0.0, 0.0, sum(self.sizes.values())

        def read(share: float) -> None:  # called for every row: a bar needs to know less often
            nonlocal shown
            if done + share - shown > total / 1000:
                shown = done + share
                progress(shown / total)

        for path in self.files if self.read_file is read_passages else ():
            try:
                encoding = self._encoding(path, read)
                if encoding != self.encodings[0]:
                    others[str(path)] = encoding
            except CorpusError as error:
                bad[str(path)] = str(error)
            done += self.sizes[path]
        if bad and (len(bad) == len(self.files) or not self.skip):
            raise CorpusError(self._refusal(list(bad.values())))
        return {"files": len(self.files) - len(bad), "skipped": bad, "encodings": others}

    def _encoding(self, path: Path, progress: Callable[[float], None]) -> str:
        """The encoding in which a file can be read to its end."""
        for encoding in self.encodings:
            try:
                passages = read_passages(path, self.column, encoding)
                shares = ((passage.share or 0) * self.sizes[path] for passage in passages)
                deque(map(progress, shares), maxlen=0)
                return encoding
            except CorpusError as error:
                last = encoding == self.encodings[-1]
                if last or not isinstance(error.__cause__, UnicodeError):
                    raise
        raise AssertionError

    def _refusal(self, messages: list[str]) -> str:
        if len(self.files) == 1:
            text = messages[0]
        else:
            named = "".join(f"\n  {message}" for message in messages[:_NAMED])
            more = len(messages) - _NAMED
            named += f"\n  and {more} more" if more > 0 else ""
            text = (
                f"{len(messages)} of {len(self.files)} files of the corpus {self.corpus!r} cannot "
                f"be read:{named}"
            )
        advice = []
        if any("is not text in" in message for message in messages):
            advice.append(
                "encoding=utf-16 would read them as UTF-16, and encoding=utf-8,cp1252 every file "
                "in the first of these that fits"
            )
        if len(messages) < len(self.files):
            advice.append("bad_files=skip leaves them out")
        return "\n".join((text, "; ".join(advice) + ".")) if advice else text

    def splits(self) -> dict[str, str]:
        """The source's names of ``train`` and, if it has a test split of its own, ``test``."""
        return {"train": "train"}

    def read(self, split: str, bookmark: Bookmark | None) -> Iterator[Passage]:
        """The passages of a split, from a bookmark on (here the start of a file); none is empty."""
        first, passages = (bookmark["file"], bookmark["parts"]) if bookmark else (0, 0)
        sizes = [self.sizes[path] for path in self.files]
        before = list(itertools.accumulate(sizes, initial=0))
        for index in range(first, len(self.files)):
            start = {"file": index, "parts": passages}
            path = self.files[index]
            encoding = self.other_encodings.get(str(path), self.encodings[0])
            for text, ends, share, _ in self.read_file(path, self.column, encoding):
                if text:
                    passages += 1
                    done = before[index] + (share or 0) * sizes[index]
                    yield Passage(text, ends, done / before[-1], start)


class HubSource:
    """A dataset of the Hugging Face Hub, streamed: only its tokens are stored."""

    def __init__(self, corpus: str, text_column: str, *of_files: str) -> None:
        self.corpus, self.column = corpus, text_column
        self.name, _, config = corpus.removeprefix(HUB).partition("@")
        self.config = config or None
        self.identity: list[Any] = []  # a cached corpus needs no network
        self.by_passages = False
        self._splits: Any = None
        if not self.name:
            raise CorpusError(f"{corpus!r} names no dataset: give 'hf:owner/name[@config]'.")

    def open(
        self, pinned: dict[str, Any], progress: Callable[[float], None] = lambda share: None
    ) -> dict[str, Any]:
        """The commit of the dataset, so that a resumed preparation reads the same text."""
        from datasets import load_dataset  # takes half a second, which local corpora do not need
        from datasets.exceptions import DatasetNotFoundError

        revision = pinned["revision"] if pinned else self._revision()
        try:
            self._splits = load_dataset(self.name, self.config, revision=revision, streaming=True)
        except Exception as error:  # the Hub and readers have their own errors
            hint = self._owned() if isinstance(error, DatasetNotFoundError) else ""
            raise CorpusError(f"Cannot load the dataset {self.corpus!r}: {error}{hint}") from error
        return {"revision": revision, "splits": self.splits()}

    def splits(self) -> dict[str, str]:
        """``train`` or the only split; ``test`` or ``validation`` if there is one."""
        names = list(self._splits)
        train = "train" if "train" in names or len(names) != 1 else names[0]
        if train not in names:
            raise CorpusError(
                f"The dataset {self.corpus!r} has no split 'train' (found: {', '.join(names)})."
            )
        test = next((name for name in ("test", "validation") if name in names), train)
        return {"train": train} if test == train else {"train": train, "test": test}

    def read(self, split: str, bookmark: Bookmark | None) -> Iterator[Passage]:
        """The rows in the order of the dataset; rows without text are skipped."""
        from datasets import __version__ as version

        rows = self._splits[split]
        self._check_column(rows.column_names)
        if rows.column_names is not None:
            rows = rows.select_columns([self.column])
        rows, passages, read = rows.with_format("arrow"), 0, 0
        if bookmark and bookmark["datasets"] == version:  # other versions may read it differently
            rows.load_state_dict(bookmark["state"])
            passages, read = bookmark["parts"], bookmark["rows"]
        known = (rows.info.splits or {}).get(split)
        count = known.num_examples if known is not None else None
        batches = rows.iter(batch_size=_ROWS)
        while True:
            state = rows.state_dict()
            start = {"datasets": version, "state": state, "parts": passages, "rows": read}
            if (batch := self._next(batches)) is None:
                return
            self._check_column(batch.column_names)
            for text in batch.column(self.column).to_pylist():
                read += 1
                if text is not None and not isinstance(text, str):
                    raise CorpusError(
                        f"{self.corpus}: column {self.column!r} contains {type(text).__name__}, "
                        "not text; name another column with text_column."
                    )
                if text:
                    passages += 1
                    yield Passage(text, True, min(read / count, 1.0) if count else None, start)

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, None)
        except Exception as error:  # a lost connection, a damaged file
            raise CorpusError(
                f"Cannot read the dataset {self.corpus!r} further: {type(error).__name__}: "
                f"{error}. Rerun the same command to resume."
            ) from error

    def _check_column(self, names: list[str] | None) -> None:
        if names is not None and self.column not in names:
            raise CorpusError(
                f"The dataset {self.corpus!r} has no column {self.column!r} (found: "
                f"{', '.join(names)}); name it with text_column."
            )

    def _revision(self) -> str | None:
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.name, timeout=10).sha
        except Exception:  # load_dataset gives the better error
            return None

    def _owned(self) -> str:
        """A hint that lists the owner's datasets, if none of them has this name."""
        from huggingface_hub import HfApi

        owner = self.name.partition("/")[0]
        try:
            names = [info.id for info in HfApi().list_datasets(author=owner, limit=500)]
        except Exception:  # the Hub may be out of reach
            return ""
        if self.name in names:  # it exists, but access is denied
            return ""
        return f"{nearest(self.name, names)} Found: {', '.join(names[:20]) or 'none'}."


Source = LocalSource | HubSource
