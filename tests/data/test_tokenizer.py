"""Tokenizers by name or folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from softmax_rnn.data import load_tokenizer, prepare


def test_bytes_are_tokens() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "naïve ✓\n\tdef f():\x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (len(tokenizer), tokenizer.eos_token_id) == (257, 256)


def test_any_fast_tokenizer_from_a_folder(texts: Path, tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "<end>": 1, "state": 2, "key": 70_000}
    model = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>").save_pretrained(
        tmp_path / "words"
    )
    corpus = prepare(str(texts), load_tokenizer(str(tmp_path / "words")), cache=tmp_path)
    assert set(np.unique(corpus.tokens("train")[:])) <= set(vocab.values())
    with pytest.raises(ValueError, match="Cannot load the tokenizer 'no/such'"):
        load_tokenizer("no/such")
    PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless"))
