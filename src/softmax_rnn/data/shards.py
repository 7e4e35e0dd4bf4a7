"""Writing shards: aside, then renamed, with a journal that says how far the source was read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from softmax_rnn._utils.files import write_json
from softmax_rnn.data.manifest import SPLITS, sha256, shard_name


class _Shard:
    """The two files of one shard, still aside."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.tokens, self.documents = 0, 0
        self._files: dict[str, BinaryIO] = {}
        self._digests = {ending: hashlib.sha256() for ending in (".bin", ".idx")}
        for ending in self._digests:
            self._files[ending] = self._aside(ending).open("wb")

    def _aside(self, ending: str) -> Path:
        return self.folder / f".{self.name}{ending}.parts"

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        starts = self.tokens + np.cumsum(lengths) - lengths
        for ending, array in ((".bin", ids), (".idx", starts)):
            data = np.ascontiguousarray(array).data
            self._files[ending].write(data)
            self._digests[ending].update(data)
        self.tokens += len(ids)
        self.documents += len(lengths)

    def finish(self) -> dict[str, Any]:
        for ending, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._aside(ending).replace(self.folder / (self.name + ending))
        return {
            "name": self.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "sha256": self._digests[".bin"].hexdigest(),
            "index_sha256": self._digests[".idx"].hexdigest(),
        }

    def discard(self) -> None:
        for ending, file in self._files.items():
            with contextlib.suppress(OSError):  # what it still holds may not fit on the disk
                file.close()
            self._aside(ending).unlink(missing_ok=True)


def write_sealed(path: Path, data: dict[str, Any]) -> None:
    """Write plain data with its hash."""
    write_json(path, {**data, "seal": sha256(json.dumps(data))})


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What :func:`write_sealed` has written; ``None`` if it is not that any more."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        seal = data.pop("seal")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return data if seal == sha256(json.dumps(data)) else None


class Journal:
    """The stretches of a source that are done, each with the shards made of it.

    A stretch is a run of passages; its documents go to one shard of each split at most. It is done
    when its record has its name; the record says where the next one starts. Whatever else lies in
    the folder is of a stretch that is not done, and is written over.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder = folder
        self.width = np.dtype(dtype).itemsize
        self.records: list[dict[str, Any]] = []
        while (path := self._path(len(self.records))).exists():
            record = read_sealed(path)
            if record is None or not all(
                self._whole(shard) for found in record["shards"].values() for shard in found
            ):
                break  # made again from here on
            self.records.append(record)
        self._open: dict[str, _Shard] = {}

    def _path(self, number: int) -> Path:
        return self.folder / f"stretch-{number:05}.json"

    def _whole(self, shard: dict[str, Any]) -> bool:
        path = self.folder / shard["name"]
        sizes = {".bin": shard["tokens"] * self.width, ".idx": shard["documents"] * 8}
        files = {path.with_suffix(ending): size for ending, size in sizes.items()}
        return all(file.exists() and file.stat().st_size == size for file, size in files.items())

    @property
    def tokens(self) -> int:
        """Tokens of the stretch that is being written."""
        return sum(shard.tokens for shard in self._open.values())

    @property
    def total_tokens(self) -> int:
        """Tokens of all finished shards."""
        return sum(shard["tokens"] for split in SPLITS for shard in self.shards(split))

    def shards(self, split: str) -> list[dict[str, Any]]:
        """The finished shards of a split."""
        return [shard for record in self.records for shard in record["shards"].get(split, [])]

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64], test: NDArray[np.bool_]) -> None:
        """Write whole passages to the splits they belong to.

        Args:
            ids: [tokens] of all of them, end to end.
            lengths: [passages] tokens of each.
            test: [passages] whether it belongs to the test split.
        """
        belongs = np.repeat(test, lengths)
        for split, chosen in zip(SPLITS, (~test, test), strict=True):
            if not chosen.any():
                continue
            if split not in self._open:
                number = len(self.shards(split))
                self._open[split] = _Shard(self.folder, shard_name(split, number))
            mine = ids if chosen.all() else ids[belongs == (split == "test")]
            self._open[split].add(mine, lengths[chosen])

    def commit(self, **where: Any) -> None:
        """Finish the stretch: its shards get their names, then its record."""
        shards = {split: [shard.finish()] for split, shard in self._open.items()}
        self._open.clear()
        record = {"shards": shards, **where}
        write_sealed(self._path(len(self.records)), record)
        self.records.append(record)

    def discard(self) -> None:
        """Remove what is still aside."""
        for shard in self._open.values():
            shard.discard()
        self._open.clear()
