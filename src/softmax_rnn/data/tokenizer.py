"""Tokenizers: bytes by default, or any fast Hugging Face tokenizer by name or path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from softmax_rnn._utils.errors import nearest

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: ids 0 to 255 are the bytes of UTF-8, id 256 ends each document."""
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    fast.name_or_path = "bytes"  # recorded by prepared corpora
    return fast


def load_tokenizer(
    name: str, *, end_of_text: str | None = None, local: bool = False, ends: bool = True
) -> PreTrainedTokenizerBase:
    """``bytes``, or a fast Hugging Face tokenizer by its name on the Hub or its local path.

    Args:
        name: the tokenizer's name or path; a GGUF file contains one as well.
        end_of_text: token of its vocabulary that ends each document; by default its own.
        local: whether to use local files only.
        ends: whether it must have an end-of-text token; a task's has none.

    Raises:
        ValueError: if it cannot be loaded, is not a fast tokenizer or lacks the end-of-text token.
    """
    tokenizer = byte_tokenizer() if name == "bytes" else _pretrained(name, local)
    if end_of_text is not None:
        vocabulary = tokenizer.get_vocab()
        if end_of_text not in vocabulary:
            raise ValueError(
                f"The tokenizer {name!r} has no token {end_of_text!r} to end documents with."
                f"{nearest(end_of_text, vocabulary)} Its special tokens: {_special(tokenizer)}."
            )
        tokenizer.add_special_tokens({"eos_token": end_of_text})
    if ends and tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {name!r} has no end-of-text token to end documents with: name one of "
            f"its tokens with end_of_text. Its special tokens: {_special(tokenizer)}."
        )
    return tokenizer


def _special(tokenizer: PreTrainedTokenizerFast) -> str:
    return ", ".join(list(tokenizer.get_added_vocab())[:20]) or "none"


def _pretrained(name: str, local: bool) -> PreTrainedTokenizerFast:
    place = name
    options: dict[str, Any] = {}
    if name.endswith(".gguf"):
        place, options = str(Path(name).parent), {"gguf_file": Path(name).name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=False, local_files_only=local, **options
        )
    except Exception as error:  # transformers also raises the errors of its parsers
        raise ValueError(
            f"Cannot load the tokenizer {name!r}: give 'bytes', a local folder or a name on the "
            f"Hugging Face Hub. ({error})"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"The tokenizer {name!r} has no fast version (tokenizer.json).")
    return tokenizer
