"""Tokens on disk: what is in them, how they are split, when they are made again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import softmax_rnn.data.preparation as preparation
from softmax_rnn.data import CorpusError, Progress, TokenBlocks, load_tokenizer, prepare
from softmax_rnn.data.prepare import _cores
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


def test_made_once_and_again_when_something_changes(texts: Path, cache: Path) -> None:
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
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        prepare(str(texts), byte_tokenizer(), test_fraction=1.5, cache=cache)
    with pytest.raises(ValueError, match=r"split_seed must lie in .*, not -1"):
        prepare(str(texts), byte_tokenizer(), split_seed=-1, cache=cache)
    with pytest.raises(ValueError, match=r"max_tokens must be below 2\*\*53, not 1000"):
        prepare(str(texts), byte_tokenizer(), max_tokens=10**30, cache=cache)
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(CorpusError, match=r"none\.jsonl. holds no text"):
        prepare(str(tmp_path / "none.jsonl"), byte_tokenizer(), cache=cache)
    corpus = prepare(str(texts), byte_tokenizer(), cache=cache)
    with pytest.raises(CorpusError, match="The test split .* of 5000.* larger --test_fraction"):
        TokenBlocks(corpus, "test", 5000)
    with pytest.raises(CorpusError, match="The train split .* of 50000.* smaller --test_fraction"):
        TokenBlocks(corpus, "train", 50000)


def test_bytes_are_tokens() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "naïve ✓\n\tdef f():\x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (len(tokenizer), tokenizer.eos_token_id) == (257, 256)


def test_any_fast_tokenizer_from_a_folder(texts: Path, tmp_path: Path, cache: Path) -> None:
    vocab = {"[UNK]": 0, "<end>": 1, "state": 2, "key": 70_000}
    model = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>").save_pretrained(
        tmp_path / "words"
    )
    corpus = prepare(str(texts), load_tokenizer(str(tmp_path / "words")), cache=cache)
    assert set(np.unique(corpus.tokens("train")[:])) <= set(vocab.values())
    with pytest.raises(ValueError, match="Cannot load the tokenizer 'no/such'"):
        load_tokenizer("no/such")
    PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless"))


def test_more_threads_than_cores_are_not_taken(
    texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads ahead: with thousands a corpus would be in memory whole."""
    seen: list[int] = []
    original = preparation.encode_all

    def encode_all(encoder: Any, work: Any, workers: int) -> Any:
        seen.append(workers)
        return original(encoder, work, workers)

    monkeypatch.setattr(preparation, "encode_all", encode_all)
    prepare(str(texts), byte_tokenizer(), cache=cache, workers=5000)
    assert seen == [_cores()]
