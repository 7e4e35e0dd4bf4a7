"""Tokenise a corpus once: two memory-mapped token streams, train and test, and a manifest."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from softmax_rnn.data.corpus import CorpusError, corpus_files, read_documents
from softmax_rnn.files import folder_aside, write_json

_FORMAT = 1  # raise it when the files written here change
_BATCH = 256  # documents tokenised at once
# With fewer documents than this, passages of the token stream are held out in their place.
_FEW_DOCUMENTS = 20
_PASSAGES = 100


def default_cache() -> Path:
    """Where prepared corpora are kept: ``$SOFTMAX_RNN_CACHE``, or the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SOFTMAX_RNN_CACHE") or Path(home) / "softmax-rnn")


@dataclass(frozen=True)
class PreparedCorpus:
    """A tokenised corpus on disk.

    Attributes:
        folder: holds ``train.bin``, ``test.bin`` and ``manifest.json``.
        manifest: source, tokenizer, counts of documents and tokens, hashes.
    """

    folder: Path
    manifest: dict[str, Any]

    def tokens(self, split: str) -> NDArray[Any]:
        """The token stream of ``train`` or ``test``, memory-mapped, documents end to end."""
        return np.memmap(self.folder / f"{split}.bin", dtype=self.manifest["dtype"], mode="r")


def prepare(
    corpus: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_column: str = "text",
    test_fraction: float = 0.02,
    split_seed: int = 123,
    cache: Path | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> PreparedCorpus:
    """Tokenise ``corpus``, or find it tokenised in the cache.

    Whole documents go to the test split, drawn with ``split_seed``. A corpus of a few documents
    only (one book, say) is split by passages, a hundredth of it each, in their place.

    Args:
        corpus: what :func:`softmax_rnn.data.corpus.corpus_files` takes.
        tokenizer: a fast tokenizer; its end-of-text token ends every document.
        text_column: key or column of the text in JSON lines and Parquet.
        test_fraction: share of the documents to hold out; at least one is.
        split_seed: draws the documents held out.
        cache: folder of prepared corpora; :func:`default_cache` unless given.
        progress: called with the share of the files' bytes that is done.

    Raises:
        CorpusError: for a file that cannot be read (which one), or no text at all.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, not {test_fraction!r}.")
    files = corpus_files(corpus)
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    settings = {
        "corpus": corpus,
        "text_column": text_column,
        "test_fraction": test_fraction,
        "split_seed": split_seed,
        "tokenizer": _sha256(tokenizer.backend_tokenizer.to_str().encode()),
        "end_of_text": tokenizer.eos_token_id,
    }
    key = _sha256(json.dumps([_FORMAT, settings, stats]).encode())[:16]
    folder = (cache or default_cache()) / f"corpus-{key}"
    if not (folder / "manifest.json").exists():
        with folder_aside(folder) as aside:
            documents = _documents(files, text_column, progress)
            manifest = {**settings, **_write(documents, tokenizer, aside, settings)}
            write_json(aside / "manifest.json", {**manifest, "files": len(files)})
    return PreparedCorpus(folder, json.loads((folder / "manifest.json").read_text()))


def _documents(
    files: list[Path], text_column: str, progress: Callable[[float], None]
) -> Iterator[str]:
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        yield from (text for text in read_documents(path, text_column) if text)
        done += path.stat().st_size
        progress(done / total)


def _write(
    documents: Iterator[str],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Write the two streams; return their counts and hashes."""
    rows = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
    dtype = np.dtype("uint16" if rows <= 2**16 else "uint32")
    everything = folder / "all.bin"
    with everything.open("wb") as file:
        lengths, text_hash = _tokenise(documents, tokenizer, dtype, file)
    if not lengths:
        raise CorpusError(f"The corpus {settings['corpus']!r} holds no text.")
    stream = np.memmap(everything, dtype=dtype, mode="r")
    unit = "document"
    if len(lengths) < _FEW_DOCUMENTS:
        unit = "passage"
        cuts = np.linspace(0, len(stream), _PASSAGES + 1).astype(np.int64)
        lengths = [int(length) for length in np.diff(cuts) if length]
    held_out = max(1, round(settings["test_fraction"] * len(lengths)))
    draw = np.random.default_rng(settings["split_seed"])
    is_test = np.zeros(len(lengths), dtype=bool)
    is_test[draw.choice(len(lengths), min(held_out, len(lengths) - 1), replace=False)] = True
    counts: dict[str, Any] = {}
    ends = np.cumsum(lengths)
    for split, wanted in (("train", ~is_test), ("test", is_test)):
        digest, tokens = hashlib.sha256(), 0
        with (folder / f"{split}.bin").open("wb") as file:
            for index in np.flatnonzero(wanted):
                piece = stream[ends[index] - lengths[index] : ends[index]].tobytes()
                file.write(piece)
                digest.update(piece)
                tokens += int(lengths[index])
        counts[split] = {
            f"{unit}s": int(wanted.sum()),
            "tokens": tokens,
            "sha256": digest.hexdigest(),
        }
    del stream
    everything.unlink()
    return {
        **counts,
        "text_sha256": text_hash,
        "dtype": dtype.name,
        "vocab_size": rows,
    }


def _tokenise(
    documents: Iterator[str],
    tokenizer: PreTrainedTokenizerBase,
    dtype: np.dtype[Any],
    file: BinaryIO,
) -> tuple[list[int], str]:
    """Append every document's tokens and its end to ``file``; return their lengths and a hash."""
    lengths: list[int] = []
    digest = hashlib.sha256()
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    while batch := list(itertools.islice(documents, _BATCH)):
        for text, encoding in zip(batch, encode(batch, add_special_tokens=False), strict=True):
            ids = np.array([*encoding.ids, tokenizer.eos_token_id], dtype=dtype)
            file.write(ids.tobytes())
            lengths.append(len(ids))
            digest.update(text.encode() + b"\0")
    return lengths, digest.hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
