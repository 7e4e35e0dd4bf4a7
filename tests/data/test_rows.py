"""Rows of tokens and their order: blocks, or one document per row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import softmax_rnn.data.rows as rows_module
from softmax_rnn.data import DocumentRows, PreparedCorpus, TokenBlocks, prepare
from softmax_rnn.data.tokenizer import byte_tokenizer

SIZE = 200


def test_blocks_cut_the_stream(texts: Path, tmp_path: Path) -> None:
    corpus = prepare(str(texts), byte_tokenizer(), cache=tmp_path)
    blocks = TokenBlocks(corpus, "train", 100)
    stream = torch.cat([block["input_ids"] for block in blocks])  # type: ignore[attr-defined]
    assert torch.equal(stream, torch.from_numpy(corpus.tokens("train")[: len(stream)].astype(int)))
    assert len(corpus.tokens("train")) - len(stream) < 100


@pytest.mark.parametrize("table", [2**24, 10])
def test_order_is_a_function_of_seed_and_position(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: int
) -> None:
    """Also with more blocks than a permutation is written down for."""
    monkeypatch.setattr(rows_module, "_TABLE", table)
    blocks = TokenBlocks(prepare(str(texts), byte_tokenizer(), cache=tmp_path), "train", 100)
    count = len(blocks)

    def order(seed: int, positions: range) -> list[bytes]:
        drawn = [blocks[blocks.drawn(seed, i)] for i in positions]
        return [block["input_ids"].numpy().tobytes() for block in drawn]

    every = [block["input_ids"].numpy().tobytes() for block in blocks]  # type: ignore[attr-defined]
    first, second = order(0, range(count)), order(0, range(count, 2 * count))
    assert sorted(first) == sorted(second) == sorted(every)
    assert first != second != every
    assert order(0, range(count, 2 * count)) == second  # asked for alone
    assert order(1, range(count)) != first


@pytest.fixture
def corpus(texts: Path, tmp_path: Path) -> PreparedCorpus:
    """Documents of 20 to 330 bytes, in shards of a few."""
    for i, path in enumerate(sorted(texts.iterdir())):
        path.write_text(path.read_text()[: 20 + 8 * i])
    return prepare(str(texts), byte_tokenizer(), cache=tmp_path, shard_tokens=1000)


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_documents_truncated_or_padded(corpus: PreparedCorpus, split: str) -> None:
    rows = DocumentRows(corpus, split, SIZE)
    stream = corpus.tokens(split)[:].astype(np.int64)
    documents = np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]
    assert len(rows) == len(documents) == corpus.manifest[split]["documents"]
    for index, document in enumerate(documents):
        row, length = rows[index], min(len(document), SIZE)
        assert all(value.shape == (SIZE,) for value in row.values())
        assert torch.equal(row["input_ids"][:length], torch.from_numpy(document[:length]))
        assert (row["input_ids"][length:] == 256).all()
        assert torch.equal(row["labels"][:length], row["input_ids"][:length])
        assert (row["labels"][length:] == -100).all()
        assert row["attention_mask"].tolist() == [1] * length + [0] * (SIZE - length)
    lengths = [min(len(document), SIZE) for document in documents]
    assert rows.lengths(np.arange(len(rows))).tolist() == lengths
    with pytest.raises(IndexError, match=f"Document {len(rows)} of {len(rows)}"):
        rows[len(rows)]


def test_the_corpus_has_what_the_tests_are_about(corpus: PreparedCorpus) -> None:
    rows = DocumentRows(corpus, "train", SIZE)
    lengths = rows.lengths(np.arange(len(rows)))
    assert len(corpus.manifest["train"]["shards"]) > 3
    assert (lengths == SIZE).any()
    assert (lengths < SIZE).any()


def test_sampling_is_a_function_of_seed_and_position(corpus: PreparedCorpus) -> None:
    rows = DocumentRows(corpus, "train", SIZE)

    def drawn(seed: int, positions: range) -> list[bytes]:
        return [rows[rows.drawn(seed, i)]["input_ids"].numpy().tobytes() for i in positions]

    first = drawn(0, range(100))
    assert drawn(0, range(50, 100)) == first[50:]  # asked for alone
    assert drawn(1, range(100)) != first
    assert len(set(first[: len(rows)])) < len(rows)  # with replacement
    every = {rows[i]["input_ids"].numpy().tobytes() for i in range(len(rows))}
    assert {*drawn(0, range(1000))} == every


def test_tokens_are_counted_without_padding(corpus: PreparedCorpus) -> None:
    rows = DocumentRows(corpus, "train", SIZE)
    drawn = [rows[rows.drawn(0, i)] for i in range(10, 60)]
    assert rows.drawn_tokens(0, 10, 60) == sum(int(row["attention_mask"].sum()) for row in drawn)
    assert rows.drawn_tokens(0, 10, 10) == 0
