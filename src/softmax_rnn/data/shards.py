"""Shards of tokens on disk, the journal of their preparation, and the prepared corpus.

manifest.json      source, tokenizer, settings; for each split its counts, hashes and shards
train-00000.bin    the tokens of all documents in sequence
train-00000.idx    where each document starts in that shard, int64
test-00000.bin     the same for the test split
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softmax_rnn._utils.integrity import MANIFEST, file_damage, read_sealed, write_sealed
from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn.data.manifest import SPLITS, read_manifest, shard_name
from softmax_rnn.data.readers import CorpusError

File = tuple[Path, int, str]  # path, size in bytes, hash


def shard_files(folder: Path, shard: dict[str, Any], dtype: str) -> Iterator[File]:
    """The two files of a shard, by its entry in the manifest or journal."""
    path = folder / shard["name"]
    yield path.with_suffix(".bin"), shard["tokens"] * np.dtype(dtype).itemsize, shard["sha256"]
    yield path.with_suffix(".idx"), shard["documents"] * 8, shard["index_sha256"]


class _Shard:
    """The two files of a shard that is being written, under temporary names."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.tokens, self.documents = 0, 0
        self._digests = {suffix: hashlib.sha256() for suffix in (".bin", ".idx")}
        self._files = {s: (folder / f".{name}{s}.parts").open("wb") for s in self._digests}

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        starts = self.tokens + np.cumsum(lengths) - lengths
        for suffix, array in ((".bin", ids), (".idx", starts)):
            data = np.ascontiguousarray(array).data
            self._files[suffix].write(data)
            self._digests[suffix].update(data)
        self.tokens += len(ids)
        self.documents += len(lengths)

    def finish(self) -> dict[str, Any]:
        for suffix, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            Path(file.name).replace(self.folder / (self.name + suffix))
        return {
            "name": self.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "sha256": self._digests[".bin"].hexdigest(),
            "index_sha256": self._digests[".idx"].hexdigest(),
        }

    def discard(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # its buffer may not fit on the disk
                file.close()
            Path(file.name).unlink(missing_ok=True)


class Journal:
    """The finished segments of a source, each with its shards.

    A segment is a sequence of passages. Its documents are in at most one shard of each split. It is
    finished once its record is in the folder (as ``stretch-*.json``); the record says where the
    next segment starts. Files of an unfinished segment are overwritten.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self._open: dict[str, _Shard] = {}
        while (path := self._path(len(self.records))).exists():
            record = read_sealed(path)
            if record is None:
                break  # this segment and all later ones are prepared again
            shards = [shard for found in record["shards"].values() for shard in found]
            files = [file for shard in shards for file in shard_files(folder, shard, dtype)]
            if any(file_damage(path, size) for path, size, _ in files):
                break
            self.records.append(record)

    def _path(self, number: int) -> Path:
        return self.folder / f"stretch-{number:05}.json"

    @property
    def tokens(self) -> int:
        """Tokens of the segment that is being written."""
        return sum(shard.tokens for shard in self._open.values())

    @property
    def total_tokens(self) -> int:
        """Tokens of all finished shards."""
        return sum(shard["tokens"] for split in SPLITS for shard in self.shards(split))

    def shards(self, split: str) -> list[dict[str, Any]]:
        """The finished shards of a split."""
        return [shard for record in self.records for shard in record["shards"].get(split, [])]

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64], test: NDArray[np.bool_]) -> None:
        """Write whole passages: ids [tokens], lengths [passages], whether in test [passages]."""
        is_test = np.repeat(test, lengths)
        for split, passages, tokens in zip(SPLITS, (~test, test), (~is_test, is_test), strict=True):
            if not passages.any():
                continue
            if split not in self._open:
                name = shard_name(split, len(self.shards(split)))
                self._open[split] = _Shard(self.folder, name)
            self._open[split].add(ids if passages.all() else ids[tokens], lengths[passages])

    def commit(self, **state: Any) -> None:
        """Finish the segment: rename its shards, then write its record, which holds ``state``."""
        shards = {split: [shard.finish()] for split, shard in self._open.items()}
        self._open.clear()
        record = {"shards": shards, **state}
        write_sealed(self._path(len(self.records)), record)
        self.records.append(record)

    def discard(self) -> None:
        """Remove the temporary files."""
        for shard in self._open.values():
            shard.discard()
        self._open.clear()


class TokenStream:
    """The tokens of a split as one array, shard after shard.

    A slice within one shard is a view; a slice over several shards is a copy.
    """

    def __init__(self, shards: list[NDArray[Any]]) -> None:
        self.shards = shards
        self.ends = np.cumsum([len(shard) for shard in shards])
        self.dtype = shards[0].dtype

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, span: slice) -> NDArray[Any]:
        start, stop, step = span.indices(len(self))
        if step != 1:
            raise ValueError("Slices of a token stream must have step 1.")
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        pieces = []
        for shard, end in zip(self.shards[first : last + 1], self.ends[first:], strict=False):
            begin = end - len(shard)
            pieces.append(shard[max(start - begin, 0) : stop - begin])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.empty(0, self.dtype), *pieces])


@dataclass
class PreparedCorpus:
    """A tokenised corpus on disk.

    Attributes:
        folder: holds the shards and ``manifest.json``.
        manifest: source, tokenizer, settings, counts of documents and tokens, hashes.
    """

    folder: Path
    manifest: dict[str, Any]
    # Time of the newest checked file, in ns.
    _checked: int = field(default=0, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> PreparedCorpus:
        """Open a prepared corpus and check the sizes of its files.

        Raises:
            CorpusError: if the manifest is invalid or of another format, or if a file is missing,
                is a link to another folder or has a wrong size.
        """
        corpus = cls(folder, read_manifest(folder))
        for path, size, _ in corpus._files():
            if damage := file_damage(path, size):
                raise corpus.damaged(damage)
            if path.resolve().parent != folder.resolve():
                raise corpus.damaged(f"{path.name} is a link to {path.resolve()}")
        return corpus

    def tokens(self, split: str) -> TokenStream:
        """The token stream of ``train`` or ``test``: all documents in sequence."""
        return TokenStream(self.maps(split, ".bin", self.manifest["dtype"]))

    def maps(self, split: str, suffix: str, dtype: str) -> list[NDArray[Any]]:
        """The files of a split's shards, memory-mapped: ``.bin`` tokens, ``.idx`` starts."""
        return [
            np.memmap(self.folder / (shard["name"] + suffix), dtype=dtype, mode="r")
            for shard in self.manifest[split]["shards"]
        ]

    def verify(self) -> None:
        """Compare the hash of every file with the manifest.

        Raises:
            CorpusError: naming every file that is damaged or missing, and how to repair it.
        """
        self._check_hashes(list(self._files()))

    def check_unchanged(self) -> None:
        """Compare the hashes of the files that are newer than the manifest.

        Nothing is read if the corpus has not changed since it was prepared. A file that was found
        intact is not read again.

        Raises:
            CorpusError: as :meth:`verify`.
        """
        manifest = self.folder / MANIFEST
        try:
            checked = max(self._checked, manifest.stat().st_ctime_ns)
            times = {file: file[0].stat().st_ctime_ns for file in self._files()}
        except FileNotFoundError as error:
            raise self.damaged(f"{Path(error.filename).name} is missing") from error
        newer = [file for file, time in times.items() if time > checked]
        if not newer:
            return
        self._check_hashes(newer)
        self._checked = max(times.values())
        with contextlib.suppress(OSError):  # a read-only folder: other processes check again
            manifest.touch()

    def _check_hashes(self, files: list[File]) -> None:
        damages = []
        with ProgressBar(f"Checking {self.folder}", len(files), transient=True) as bar:
            for done, file in enumerate(files, start=1):
                damages.append(file_damage(*file))
                bar.update(done)
        if any(damages):
            raise self.damaged(*filter(None, damages))

    def _files(self) -> Iterator[File]:
        for split in SPLITS:
            for shard in self.manifest[split]["shards"]:
                yield from shard_files(self.folder, shard, self.manifest["dtype"])

    def damaged(self, *what: str) -> CorpusError:
        """The error for damaged shards, with what to do."""
        return CorpusError(
            f"The prepared corpus {self.folder} is damaged: {'; '.join(what)}. Restore those "
            f"files, or delete the folder and prepare the corpus {self.manifest['corpus']!r} again."
        )
