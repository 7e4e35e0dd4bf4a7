"""The order of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import softmax_rnn.data.blocks as blocks_module
from softmax_rnn.data import ShuffledBlocks, TokenBlocks, prepare
from softmax_rnn.data.tokenizer import byte_tokenizer


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
    monkeypatch.setattr(blocks_module, "_TABLE", table)
    blocks = TokenBlocks(prepare(str(texts), byte_tokenizer(), cache=tmp_path), "train", 100)
    count = len(blocks)

    def order(seed: int, positions: range) -> list[bytes]:
        shuffled = ShuffledBlocks(blocks, seed, 3 * count)
        return [shuffled[i]["input_ids"].numpy().tobytes() for i in positions]

    every = [block["input_ids"].numpy().tobytes() for block in blocks]  # type: ignore[attr-defined]
    first, second = order(0, range(count)), order(0, range(count, 2 * count))
    assert sorted(first) == sorted(second) == sorted(every)
    assert first != second != every
    assert order(0, range(count, 2 * count)) == second  # asked for alone
    assert order(1, range(count)) != first
