"""A prepared corpus: shards of tokens on disk, memory-mapped, and what the manifest says of them.

manifest.json      source, tokenizer, settings, and for each split its counts, hashes and shards
train-00000.bin    tokens, documents end to end
train-00000.idx    where each document starts in that shard, int64
test-00000.bin     the same of the test split
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softmax_rnn.data.corpus import CorpusError

FORMAT = 2  # raise it when the files change
_READ = 2**24  # bytes hashed at once


class TokenStream:
    """The tokens of a split, shard after shard, as if they were one array.

    Slices that lie in one shard are views of it; only those that cross into another are joined.
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
            raise ValueError("A token stream has slices of step 1 only.")
        index = int(np.searchsorted(self.ends, start, side="right"))
        pieces: list[NDArray[Any]] = []
        while start < stop:
            shard, end = self.shards[index], int(self.ends[index])
            begin = end - len(shard)
            pieces.append(shard[start - begin : min(stop, end) - begin])
            start, index = end, index + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.empty(0, self.dtype), *pieces])


@dataclass(frozen=True)
class PreparedCorpus:
    """A tokenised corpus on disk.

    Attributes:
        folder: holds the shards and ``manifest.json``.
        manifest: source, tokenizer, settings, counts of documents and tokens, hashes.
    """

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> PreparedCorpus:
        """A prepared corpus, with a look at the sizes of its files.

        Raises:
            CorpusError: if a file is missing or has another size than the manifest says, or the
                folder was written in another format.
        """
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            found = manifest.get("format")
        except (OSError, ValueError, AttributeError) as error:
            raise CorpusError(f"{folder} holds no prepared corpus: {error}.") from error
        if found != FORMAT:
            raise CorpusError(
                f"{folder} was prepared in format {found!r}, and this version reads {FORMAT}: "
                "prepare the corpus again."
            )
        corpus = cls(folder, manifest)
        for path, size, _ in corpus._files():
            actual = path.stat().st_size if path.exists() else None
            if actual != size:
                what = "is missing" if actual is None else f"has {actual} bytes, not {size}"
                raise corpus._damaged([f"{path.name} {what}"])
        return corpus

    def tokens(self, split: str) -> TokenStream:
        """The token stream of ``train`` or ``test``, documents end to end."""
        return TokenStream(self.maps(split, ".bin", self.manifest["dtype"]))

    def maps(self, split: str, ending: str, dtype: str) -> list[NDArray[Any]]:
        """The files of a split's shards, memory-mapped: ``.bin`` tokens, ``.idx`` starts."""
        return [
            np.memmap(self.folder / (shard["name"] + ending), dtype=dtype, mode="r")
            for shard in self.manifest[split]["shards"]
        ]

    def verify(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Hash every file and compare with the manifest.

        Args:
            progress: called with the share of the bytes that is done.

        Raises:
            CorpusError: naming every shard that is damaged or missing, and how to mend it.
        """
        files = list(self._files())
        total, done, bad = sum(size for _, size, _ in files), 0, []
        for path, _, expected in files:
            digest = hashlib.sha256()
            if not path.exists():
                bad.append(f"{path.name} is missing")
                continue
            with path.open("rb") as file:
                while data := file.read(_READ):
                    digest.update(data)
                    done += len(data)
                    progress(min(done / total, 1.0))
            if digest.hexdigest() != expected:
                bad.append(f"{path.name} has sha256 {digest.hexdigest()[:16]}, not {expected[:16]}")
        if bad:
            raise self._damaged(bad)

    def _files(self) -> Iterator[tuple[Path, int, str]]:
        """Every file with its size in bytes and its hash."""
        width = np.dtype(self.manifest["dtype"]).itemsize
        for split in ("train", "test"):
            for shard in self.manifest[split]["shards"]:
                path = self.folder / shard["name"]
                yield path.with_suffix(".bin"), shard["tokens"] * width, shard["sha256"]
                yield path.with_suffix(".idx"), shard["documents"] * 8, shard["index_sha256"]

    def _damaged(self, what: list[str]) -> CorpusError:
        return CorpusError(
            f"The prepared corpus {self.folder} is damaged: {'; '.join(what)}. Copy those files "
            f"from where they are whole, or delete the folder and prepare the corpus "
            f"{self.manifest['corpus']!r} again."
        )
