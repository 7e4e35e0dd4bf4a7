"""The bytes of every token add up to the bytes of the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from softmax_rnn.data.text_bytes import text_bytes
from softmax_rnn.data.tokenizer import byte_tokenizer

END = "<end>"
SAMPLE = [
    "state query key value",
    "naïve café, déjà vu",
    "世界 🙂🙃 state",
    "a  b\n\tc queries",
] * 3


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def _byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2's. Its merges are few, so rare characters are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_tokens([AddedToken("wörd", special=False)])
    return _fast(tokenizer)


def _fallback() -> PreTrainedTokenizerBase:
    """As Llama-2's: a space before every document, and bytes for what has no token."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdestué", "▁s", "st"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("▁", "s"), ("s", "t")], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _fast(tokenizer)


def _word_piece() -> PreTrainedTokenizerBase:
    """As BERT's: spaces are between words only when it decodes."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]"]
    tokenizer.train_from_iterator(SAMPLE, WordPieceTrainer(vocab_size=80, special_tokens=special))
    return _fast(tokenizer)


MADE = {"bytes": byte_tokenizer, "bpe": _byte_level, "sentencepiece": _fallback}
TOKENIZERS = {name: make() for name, make in MADE.items()}
TEXTS = st.text(st.sampled_from("abst uéï世🙂\n.,wörd"), min_size=1, max_size=12)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_the_bytes_of_documents(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    end = tokenizer.eos_token_id
    row = [end]
    for text in texts:
        row += [*_ids(tokenizer, text), end]
    found = text_bytes(tokenizer, np.array([row]))[0]
    assert len(found) == len(row) - 1
    assert found.sum() == sum(len(text.encode()) for text in texts)
    assert not found[np.array(row[1:]) == end].any()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_parts_of_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    parts = _ids(tokenizer, "stꙮ")[-3:]
    assert text_bytes(tokenizer, np.array([parts])).tolist() == [[1, 1]]


def test_spaces_that_only_the_decoder_adds() -> None:
    tokenizer = _word_piece()
    text = "statey queriess value"
    ids = _ids(tokenizer, text)
    assert [piece[:2] for piece in tokenizer.convert_ids_to_tokens(ids)].count("##") >= 2
    row = np.array([[tokenizer.eos_token_id, *ids]])
    assert text_bytes(tokenizer, row).sum() == len(text)


def test_only_the_start_of_a_document_has_no_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    space = tokenizer.convert_tokens_to_ids("▁s")
    row = np.array([[space, space, tokenizer.eos_token_id, space]])
    assert text_bytes(tokenizer, row).tolist() == [[2, 0, 1]]


def test_added_and_unused_tokens() -> None:
    tokenizer = TOKENIZERS["bpe"]
    added = tokenizer.convert_tokens_to_ids("wörd")
    assert text_bytes(tokenizer, np.array([[0, added, 10**6]])).tolist() == [[5, 0]]
