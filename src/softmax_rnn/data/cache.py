"""Prepare a corpus, or find it in the cache."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock
from pydantic import Field
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from softmax_rnn._utils.integrity import MANIFEST, sha256
from softmax_rnn._utils.machine import cache_folder
from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn._utils.validation import BadFiles, PositiveInt, Seed, validated
from softmax_rnn.data.manifest import FORMAT, is_prepared
from softmax_rnn.data.preparation import Preparation, Progress
from softmax_rnn.data.readers import CorpusError, encodings
from softmax_rnn.data.shards import PreparedCorpus
from softmax_rnn.data.source import HUB, HubSource, LocalSource
from softmax_rnn.data.tokenise import Encoder

SHARD_TOKENS = 2**27
_COMPARED = (
    *("tokenizer", "vocab_size", "dtype", "end_of_text"),
    *("text_column", "encoding", "bad_files", "test_fraction", "split_seed", "max_tokens"),
)


class _Arguments(TypedDict):
    bad_files: BadFiles
    test_fraction: Annotated[float, Field(strict=True, gt=0, lt=1)]
    split_seed: Seed
    max_tokens: PositiveInt | None
    shard_tokens: PositiveInt
    workers: PositiveInt | None


@contextlib.contextmanager
def progress_bar(corpus: str) -> Iterator[Callable[[Progress], None]]:
    """A bar with tokens, speed and time left; yields a ``progress`` for :func:`prepare`."""
    with ProgressBar(f"Reading {corpus}", transient=True) as bar:

        def show(progress: Progress) -> None:
            speed = f"{progress.tokens:,} tokens, {progress.tokens_per_second:,.0f}/s"
            what = (
                f"Checking the files of {corpus}" if progress.checking else f"Tokenising {corpus}"
            )
            bar.update(
                progress.share or 0,
                "" if progress.checking else speed,
                None if progress.share is None else 1,
                label=what,
            )

        yield show


def prepare(
    corpus: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_column: str = "text",
    encoding: str = "utf-8",
    bad_files: BadFiles = "error",
    test_fraction: float = 0.02,
    split_seed: int = 123,
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    cache: Path | None = None,
    create: bool = True,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> PreparedCorpus:
    """Tokenise ``corpus``, resume an interrupted preparation, or find the corpus in the cache.

    The test split is the dataset's own (``test``, else ``validation``); otherwise whole documents
    are drawn with ``split_seed``. If there are only a few documents (one book, say), passages are
    drawn instead: each is about 1 MiB of a long text, or a hundredth of a short text.

    Args:
        corpus: files, as :func:`softmax_rnn.data.readers.corpus_files` takes them;
            ``hf:owner/name[@config]``, a dataset of the Hugging Face Hub; or the folder of a
            prepared corpus.
        tokenizer: a fast tokenizer; its end-of-text token ends each document.
        text_column: key or column of the text in JSON lines, Parquet and datasets.
        encoding: of text and JSON lines; of several names (``utf-8,latin-1``) each file has the
            first one in which it can be read.
        bad_files: ``error``, or ``skip`` to leave out local files that cannot be read; the
            manifest names them under ``source``.
        test_fraction: share of the documents to hold out; at least one document is held out.
        split_seed: seed of that draw.
        max_tokens: stop after the document in which both splits together reach this number of
            tokens; a dataset's own test split stops at ``test_fraction`` of this number.
        shard_tokens: a shard ends with the document that reaches this number of tokens.
        workers: threads that tokenise, by default and at most one per core. Each reads about four
            million characters ahead. The result does not depend on their number.
        cache: folder of prepared corpora; by default the user's (``_utils.machine``).
        create: whether to tokenise a corpus that is not prepared.
        progress: called regularly.

    Raises:
        ValueError: for an invalid argument.
        CorpusError: if files cannot be read (it names all of them), if there is no text, or if a
            prepared corpus is damaged or has other settings.
        FileNotFoundError: without ``create``, if the corpus is not prepared.
        OSError: if the disk is full. Finished shards are kept, and the next call resumes.
    """
    encoder = Encoder(tokenizer)
    settings = {
        "corpus": corpus,
        "text_column": text_column,
        "encoding": ",".join(encodings(encoding)),
        "bad_files": bad_files,
        "test_fraction": test_fraction,
        "split_seed": split_seed,
        "max_tokens": max_tokens,
        "shard_tokens": shard_tokens,
        "tokenizer": sha256(encoder.definition),
        "end_of_text": encoder.end,
    }
    validated(_Arguments, {**settings, "workers": workers})
    about = {
        "format": FORMAT,
        **settings,
        "tokenizer_name": tokenizer.name_or_path,
        "vocab_size": encoder.vocab_size,
        "dtype": encoder.dtype,
    }
    folder = Path(corpus)
    if not is_prepared(corpus):
        kind = HubSource if corpus.startswith(HUB) else LocalSource
        source = kind(corpus, text_column, encoding, bad_files)
        key = sha256(json.dumps([FORMAT, settings, source.identity]))[:16]
        folder = (cache or cache_folder()) / f"corpus-{key}"
        if not (folder / MANIFEST).exists():
            if not create:
                raise FileNotFoundError(f"The corpus {corpus!r} is not prepared.")
            threads = min(workers or _cores(), _cores())
            _create(folder, Preparation(source, encoder, about, threads, progress).run)
    prepared = PreparedCorpus.open(folder)
    _require_settings(prepared, about)
    return prepared


def check(
    corpus: str,
    *,
    text_column: str = "text",
    encoding: str = "utf-8",
    bad_files: BadFiles = "error",
    progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Read every local file of a corpus, as :func:`prepare` does before it tokenises.

    Returns:
        ``source`` of the manifest that :func:`prepare` would write; empty for a prepared corpus,
        and for a dataset of the Hub, of which nothing is read.

    Raises:
        CorpusError: if files cannot be read; it names all of them.
    """
    if corpus.startswith(HUB) or is_prepared(corpus):
        return {}
    source = LocalSource(corpus, text_column, encoding, bad_files)
    return source.open({}, lambda share: progress(Progress(share, 0, 0.0, checking=True)))


def left_out(source: dict[str, Any]) -> str:
    """What ``source`` of a manifest says of files that were left out; empty if none were."""
    if not (skipped := source.get("skipped")):
        return ""
    names = list(skipped)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{len(names)} files cannot be read and are left out: {', '.join(names[:20])}{more}."


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _require_settings(corpus: PreparedCorpus, settings: dict[str, Any]) -> None:
    manifest = corpus.manifest
    differing = [
        f"{key}={manifest[key]!r} (requested: {settings[key]!r})"
        for key in _COMPARED
        if manifest[key] != settings[key]
    ]
    if manifest["tokenizer"] != settings["tokenizer"]:
        differing = [f"another tokenizer, {manifest['tokenizer_name']!r}"]
    if differing:
        raise CorpusError(
            f"{corpus.folder} was prepared with {', '.join(differing)}: use the same settings, or "
            f"prepare {manifest['corpus']!r} again."
        )


def _create(folder: Path, fill: Callable[[Path], None]) -> None:
    """Call ``fill`` for a folder in one process at a time; finished shards survive a failure."""
    if folder.exists() and not (folder / MANIFEST).exists():
        raise CorpusError(f"{folder} has lost its {MANIFEST}: delete it to prepare it again.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    parts = folder.with_name(f".{folder.name}.parts")
    with FileLock(lock):  # released even if its process is killed
        if not folder.exists():  # else another process prepared it in the meantime
            parts.mkdir(exist_ok=True)
            try:
                fill(parts)
                parts.replace(folder)
            except BaseException as error:
                kept = any(parts.glob("stretch-*.json")) or (parts / MANIFEST).exists()
                if not kept:
                    shutil.rmtree(parts, ignore_errors=True)
                    error.add_note("no part of the corpus was kept")
                if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
                    raise
                advice = "Finished shards are kept: free some space and rerun to resume"
                if not kept:
                    advice = "No shard was finished: free some space and start again"
                message = f"No space left on the disk of {parts}. {advice}"
                raise OSError(error.errno, message) from error
    lock.unlink(missing_ok=True)  # a process that waits for it will find the folder
