"""Prepared corpora: what they hold, how they are split, when they are prepared again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softmax_rnn.data.preparation as preparation
from softmax_rnn.data import CorpusError, Progress, TokenBlocks, prepare
from softmax_rnn.data.cache import _cores
from softmax_rnn.data.tokenizer import byte_tokenizer


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_every_document_is_in_one_split_and_whole(texts: Path, cache: Path) -> None:
    corpus = prepare(str(texts), byte_tokenizer(), test_fraction=0.1, cache=cache)
    found = {"train": [], "test": []}
    for split, documents in found.items():
        stream = corpus.tokens(split)[:]
        assert stream.dtype == np.uint16
        assert hashlib.sha256(stream.tobytes()).hexdigest() == corpus.manifest[split]["sha256"]
        assert len(stream) == corpus.manifest[split]["tokens"]
        for piece in np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]:
            documents.append(bytes(piece[:-1].tolist()).decode())
    written = [path.read_text() for path in sorted(texts.iterdir())]
    assert sorted(found["train"] + found["test"]) == sorted(written)
    assert len(found["test"]) == corpus.manifest["test"]["documents"] == 4


def test_prepared_once_and_again_when_something_changes(texts: Path, cache: Path) -> None:
    def key(**options: object) -> str:
        return prepare(str(texts), byte_tokenizer(), cache=cache, **options).folder.name  # type: ignore[arg-type]

    first = key()
    stamp = (cache / first / "train-00000.bin").stat().st_mtime_ns
    assert key() == first
    assert (cache / first / "train-00000.bin").stat().st_mtime_ns == stamp
    assert key(split_seed=1) != first
    (texts / "00.txt").write_text("something else\n")
    assert key() != first
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_a_failure_leaves_nothing_behind(texts: Path, cache: Path) -> None:
    (texts / "39.txt").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match="39.txt"):
        prepare(str(texts), byte_tokenizer(), cache=cache)
    assert {path.suffix for path in cache.iterdir()} <= {".lock"}


def test_one_book_is_split_by_passages(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "book.txt").write_text("abcdefghi\n" * 400)
    corpus = prepare(str(tmp_path / "book.txt"), byte_tokenizer(), cache=cache)
    assert corpus.manifest["test"]["passages"] == 2
    assert len(corpus.tokens("train")) + len(corpus.tokens("test")) == 4001


def test_progress_reaches_the_end(texts: Path, cache: Path) -> None:
    seen: list[Progress] = []
    prepare(str(texts), byte_tokenizer(), cache=cache, progress=seen.append)
    shares = [progress.share for progress in seen]
    assert shares == sorted(shares)  # type: ignore[type-var]
    assert shares[-1] == pytest.approx(1.0)


def test_mistakes_are_named(texts: Path, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"test_fraction must be less than 1, not 1\.5"):
        prepare(str(texts), byte_tokenizer(), test_fraction=1.5, cache=cache)
    with pytest.raises(ValueError, match="split_seed must be greater than or equal to 0, not -1"):
        prepare(str(texts), byte_tokenizer(), split_seed=-1, cache=cache)
    with pytest.raises(ValueError, match="max_tokens must be less than 9007199254740992, not 1000"):
        prepare(str(texts), byte_tokenizer(), max_tokens=10**30, cache=cache)
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(CorpusError, match=r"none\.jsonl. holds no text"):
        prepare(str(tmp_path / "none.jsonl"), byte_tokenizer(), cache=cache)
    corpus = prepare(str(texts), byte_tokenizer(), cache=cache)
    with pytest.raises(CorpusError, match="The test split .* of 5000.* larger test_fraction"):
        TokenBlocks(corpus, "test", 5000)
    with pytest.raises(CorpusError, match="The train split .* of 50000.* smaller test_fraction"):
        TokenBlocks(corpus, "train", 50000)


def test_there_are_no_more_threads_than_cores(
    texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads ahead: with thousands a corpus would be wholly in memory."""
    seen: list[int] = []
    original = preparation.encode_all

    def encode_all(encoder: Any, work: Any, workers: int) -> Any:
        seen.append(workers)
        return original(encoder, work, workers)

    monkeypatch.setattr(preparation, "encode_all", encode_all)
    prepare(str(texts), byte_tokenizer(), cache=cache, workers=5000)
    assert seen == [_cores()]
