"""A prepared corpus: shards of tokens on disk, memory-mapped, and what the manifest says of them.

manifest.json      source, tokenizer, settings, and for each split its counts, hashes and shards
train-00000.bin    tokens, documents end to end
train-00000.idx    where each document starts in that shard, int64
test-00000.bin     the same of the test split
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softmax_rnn.data.corpus import CorpusError
from softmax_rnn.data.manifest import SPLITS, read_manifest

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
    _well: dict[Path, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> PreparedCorpus:
        """A prepared corpus, with a look at the sizes of its files.

        Raises:
            CorpusError: if the manifest says what cannot be, if a file is missing, lies elsewhere
                or has another size than the manifest says, or if the folder was written in another
                format.
        """
        corpus = cls(folder, read_manifest(folder))
        for path, size, _ in corpus._files():
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                what = "is missing" if actual is None else f"has {actual} bytes, not {size}"
                raise corpus.damaged(f"{path.name} {what}")
            if path.resolve().parent != folder.resolve():
                raise corpus.damaged(f"{path.name} is a link to {path.resolve()}")
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
        self._check_hashes(list(self._files()), progress)

    def check_unchanged(self) -> None:
        """Hash the files that were changed, or copied, after the manifest, and compare.

        Nothing is read of a corpus that lies as it was prepared; what was looked at once and found
        well is not read again.

        Raises:
            CorpusError: as :meth:`verify`.
        """
        manifest = self.folder / "manifest.json"
        try:
            checked = manifest.stat().st_ctime_ns
            changed = {f: f[0].stat().st_ctime_ns for f in self._files()}
        except FileNotFoundError as error:
            raise self.damaged(f"{Path(error.filename).name} is missing") from error
        later = {f: at for f, at in changed.items() if max(checked, self._well.get(f[0], 0)) < at}
        self._check_hashes(list(later))
        self._well.update({path: at for (path, _, _), at in later.items()})
        if later:
            with contextlib.suppress(OSError):  # read-only: others check again
                manifest.touch()

    def _check_hashes(
        self,
        files: list[tuple[Path, int, str]],
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        total, done, bad = sum(size for _, size, _ in files), 0, []
        for path, _, expected in files:
            digest = hashlib.sha256()
            if not path.is_file():
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
            raise self.damaged(*bad)

    def _files(self) -> Iterator[tuple[Path, int, str]]:
        """Every file with its size in bytes and its hash."""
        width = np.dtype(self.manifest["dtype"]).itemsize
        for split in SPLITS:
            for shard in self.manifest[split]["shards"]:
                path = self.folder / shard["name"]
                yield path.with_suffix(".bin"), shard["tokens"] * width, shard["sha256"]
                yield path.with_suffix(".idx"), shard["documents"] * 8, shard["index_sha256"]

    def damaged(self, *what: str) -> CorpusError:
        """The error for shards that are not what they were, with what to do."""
        return CorpusError(
            f"The prepared corpus {self.folder} is damaged: {'; '.join(what)}. Copy those files "
            f"from where they are whole, or delete the folder and prepare the corpus "
            f"{self.manifest['corpus']!r} again."
        )
