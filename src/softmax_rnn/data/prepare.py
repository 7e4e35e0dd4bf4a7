"""Tokenise a corpus of any size once, into shards that are memory-mapped."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from softmax_rnn.data.corpus import CorpusError
from softmax_rnn.data.encoding import Encoder, vocabulary
from softmax_rnn.data.manifest import FORMAT, sha256
from softmax_rnn.data.preparation import Preparation
from softmax_rnn.data.prepared import PreparedCorpus
from softmax_rnn.data.progress import Progress
from softmax_rnn.data.source import find_source, is_prepared

SHARD_TOKENS = 2**27
_COMPARED = (
    *("tokenizer", "vocab_size", "dtype", "end_of_text"),
    *("text_column", "test_fraction", "split_seed", "max_tokens"),
)


def default_cache() -> Path:
    """Where prepared corpora are kept: ``$SOFTMAX_RNN_CACHE``, or the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SOFTMAX_RNN_CACHE") or Path(home) / "softmax-rnn")


def prepare(
    corpus: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_column: str = "text",
    test_fraction: float = 0.02,
    split_seed: int = 123,
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    cache: Path | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> PreparedCorpus:
    """Tokenise ``corpus``, or go on with it where it was stopped, or find it in the cache.

    The test split is the dataset's own (``test``, else ``validation``), or else whole documents
    drawn with ``split_seed``. With a few documents only (one book, say), passages are drawn in
    their place: of about 1 MiB of a long text, a hundredth of a short one.

    Args:
        corpus: what :func:`softmax_rnn.data.corpus.corpus_files` takes; ``hf:owner/name[@config]``,
            a dataset of the Hugging Face Hub; or the folder of a prepared corpus.
        tokenizer: a fast tokenizer; its end-of-text token ends every document.
        text_column: key or column of the text in JSON lines, Parquet and datasets.
        test_fraction: share of the documents to hold out; at least one is.
        split_seed: draws the documents held out.
        max_tokens: read no further than the document with which the tokens of both splits reach
            this number; of a dataset's own test split, ``test_fraction`` of the number.
        shard_tokens: a shard ends with the document that brings the tokens to this number.
        workers: threads that tokenise, one a core unless given, and no more. Each has some four
            million characters before it. The result does not depend on their number.
        cache: folder of prepared corpora; :func:`default_cache` unless given.
        progress: called now and then.

    Raises:
        CorpusError: for what cannot be read (which file), for no text at all, for a prepared
            corpus that is damaged or made with other settings.
        OSError: if the disk is full. What is finished stays, and the next call goes on from there.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, not {test_fraction!r}.")
    for name, value in (
        ("max_tokens", max_tokens),
        ("shard_tokens", shard_tokens),
        ("workers", workers),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}.")
        if value is not None and value >= 2**53:
            raise ValueError(f"{name} must be below 2**53, not {value}.")
    if not 0 <= split_seed < 2**32:
        raise ValueError(f"split_seed must lie in [0, 2**32), not {split_seed!r}.")
    encoder = Encoder.of(tokenizer)
    settings = {
        "corpus": corpus,
        "text_column": text_column,
        "test_fraction": test_fraction,
        "split_seed": split_seed,
        "max_tokens": max_tokens,
        "shard_tokens": shard_tokens,
        "tokenizer": sha256(encoder.definition),
        "end_of_text": encoder.end,
    }
    made = {**settings, "vocab_size": vocabulary(tokenizer), "dtype": encoder.dtype}
    if is_prepared(corpus):
        return _with_settings(PreparedCorpus.open(Path(corpus)), made)
    source = find_source(corpus, text_column)
    key = sha256(json.dumps([FORMAT, settings, source.identity]))[:16]
    folder = (cache or default_cache()) / f"corpus-{key}"
    if not (folder / "manifest.json").exists():
        about = {
            "format": FORMAT,
            **settings,
            "tokenizer_name": tokenizer.name_or_path,
            "vocab_size": vocabulary(tokenizer),
        }
        work = Preparation(source, encoder, about, min(workers or _cores(), _cores()), progress)
        with _making(folder) as parts:
            if parts is not None:
                work.run(parts)
    return _with_settings(PreparedCorpus.open(folder), made)


def _with_settings(corpus: PreparedCorpus, settings: dict[str, Any]) -> PreparedCorpus:
    manifest = corpus.manifest
    differing = [
        f"{key}={manifest[key]!r} (asked for: {settings[key]!r})"
        for key in _COMPARED
        if manifest[key] != settings[key]
    ]
    if manifest["tokenizer"] != settings["tokenizer"]:
        differing = [f"another tokenizer, {manifest['tokenizer_name']!r}"]
    if differing:
        raise CorpusError(
            f"{corpus.folder} was prepared with {', '.join(differing)}: ask for the same, or "
            f"prepare {manifest['corpus']!r} again."
        )
    return corpus


@contextlib.contextmanager
def _making(folder: Path) -> Iterator[Path | None]:
    """The folder to fill, to this process alone; None if another one has made it meanwhile."""
    if folder.exists() and not (folder / "manifest.json").exists():
        raise CorpusError(f"{folder} has lost its manifest.json: delete it, to prepare it again.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    with FileLock(lock):  # a killed process holds it no more
        if folder.exists():
            yield None
        else:
            with _filled(folder) as parts:
                yield parts
    lock.unlink(missing_ok=True)  # whoever waits finds the folder made


@contextlib.contextmanager
def _filled(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when the block ends well, and else keeps what is finished."""
    parts = folder.with_name(f".{folder.name}.parts")
    parts.mkdir(exist_ok=True)
    try:
        yield parts
        parts.replace(folder)
    except BaseException as error:
        kept = folder.exists() or _begun(parts)
        if not kept:
            shutil.rmtree(parts, ignore_errors=True)  # nothing to go on from
            error.add_note("nothing was kept of the corpus")
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
            raise
        goes_on = "Finished shards are kept: make room, and the same command goes on"
        raise OSError(
            error.errno,
            f"No space left on the disk of {parts}. "
            + (goes_on if kept else "Make room: no shard was finished"),
        ) from error


def _begun(parts: Path) -> bool:
    return any(parts.glob("stretch-*.json")) or (parts / "manifest.json").exists()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
