"""Validation documents: out of the training split, in place of the test split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from softmax_rnn.data import (
    CorpusError,
    DocumentRows,
    PreparedCorpus,
    TaskRows,
    TokenBlocks,
    ValidationCorpus,
    parse_task,
    prepare,
)
from softmax_rnn.data.tokenizer import byte_tokenizer
from softmax_rnn.training import RunConfig
from softmax_rnn.training.run import load_rows


@pytest.fixture(params=[1000, 10**6], ids=["many shards", "one shard"])
def corpus(texts: Path, tmp_path: Path, request: pytest.FixtureRequest) -> PreparedCorpus:
    for i, path in enumerate(sorted(texts.iterdir())):
        path.write_text(f"document {i} " + path.read_text()[: 20 + 8 * i])
    tokens: int = request.param
    return prepare(str(texts), byte_tokenizer(), cache=tmp_path, shard_tokens=tokens)


def documents(corpus: PreparedCorpus, split: str) -> list[bytes]:
    """The documents of a split, in order; the end of each is the token 256."""
    stream = corpus.tokens(split)[:].astype(np.int64)
    return [x.tobytes() for x in np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]]


@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_the_training_documents_are_divided(corpus: PreparedCorpus, fraction: float) -> None:
    found = ValidationCorpus.of(corpus, fraction, 123)
    train, held = documents(found, "train"), documents(found, "test")
    assert sorted(train + held) == sorted(documents(corpus, "train"))
    assert held
    assert not set(train + held) & set(documents(corpus, "test"))
    assert len(held) == pytest.approx(fraction * len(train + held), abs=1)
    for split, texts in (("train", train), ("test", held)):
        counts = found.manifest[split]
        assert (counts["documents"], counts["tokens"]) == (len(texts), sum(map(len, texts)) // 8)
        rows = DocumentRows(found, split, 50)
        assert len(rows) == len(texts)
        for index, text in enumerate(texts):
            expected = np.frombuffer(text, np.int64)[:50]
            assert rows[index]["input_ids"][: len(expected)].tolist() == expected.tolist()
            assert rows.lengths(np.array([index])) == len(expected)
        blocks = TokenBlocks(found, split, 16)
        joined = np.concatenate([blocks.block(index) for index in range(len(blocks))])
        assert joined.astype(np.int64).tobytes() == b"".join(texts)[: joined.size * 8]


def test_the_division_is_a_function_of_its_seed(corpus: PreparedCorpus) -> None:
    first, again, other = (ValidationCorpus.of(corpus, 0.1, seed) for seed in (1, 1, 2))
    assert first.manifest == again.manifest
    assert documents(first, "test") == documents(again, "test") != documents(other, "test")
    hashes = {
        c.manifest[split]["sha256"] for c in (first, other, corpus) for split in ("train", "test")
    }
    assert len(hashes) == 6  # a run on one of them is never taken for a run on another


def test_few_documents(tmp_path: Path) -> None:
    """One is held out, whichever the draw is; of a single one, none can be."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"text {number} " * 9)
    corpus = prepare(str(texts), byte_tokenizer(), cache=tmp_path, test_fraction=0.9)
    assert len(documents(corpus, "train")) == 3
    for seed in range(20):
        found = ValidationCorpus.of(corpus, 1e-3, seed)
        assert [len(documents(found, split)) for split in ("train", "test")] == [2, 1]
    corpus = prepare(str(texts), byte_tokenizer(), cache=tmp_path, test_fraction=0.99)
    with pytest.raises(CorpusError, match="is a single document: none can be held out"):
        ValidationCorpus.of(corpus, 0.1, 0)


def test_a_damaged_index_is_told(corpus: PreparedCorpus) -> None:
    path = corpus.folder / "train-00000.idx"
    starts = np.fromfile(path, np.int64)
    starts[1] = -5
    starts.tofile(path)
    with pytest.raises(CorpusError, match="an index of its train split is not valid"):
        ValidationCorpus.of(corpus, 0.1, 0)


def test_a_task_has_rows_of_its_own_for_validation() -> None:
    task = parse_task("task:mqar?pairs=4", 32)
    rows = {split: TaskRows(task, split, 5) for split in ("train", "test", "validation")}
    assert len(rows["validation"]) == len(rows["test"])
    first = {split: each[0]["input_ids"].tolist() for split, each in rows.items()}
    assert len({tuple(ids) for ids in first.values()}) == 3


def test_a_run_reads_what_it_is_evaluated_on(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, path in enumerate(sorted(texts.iterdir())):
        path.write_text(f"<{i}> {path.read_text()}")
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path))
    fields = {"corpus": str(texts), "block_size": 16, "test_fraction": 0.1}
    plain = load_rows(RunConfig(**fields))
    found = load_rows(RunConfig(**fields, evaluate_on="validation"))
    assert isinstance(found[0], ValidationCorpus)
    read = b"".join(documents(plain[0], "test"))  # type: ignore[arg-type]
    for rows in found[1:]:
        assert isinstance(rows, TokenBlocks)
        assert rows.corpus is found[0]
        for text in documents(found[0], rows.split):
            assert text not in read
    with pytest.raises(ValueError, match="evaluate_on 'valid'. Did you mean 'validation'"):
        RunConfig(evaluate_on="valid")  # type: ignore[arg-type]
