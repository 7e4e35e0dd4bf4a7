"""Tokenizers: bytes by default, or any of Hugging Face's by name or path."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: ids 0 to 255 are the bytes of UTF-8, id 256 ends a document."""
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    fast.name_or_path = "bytes"  # what a prepared corpus calls it
    return fast


def load_tokenizer(name: str, *, local: bool = False) -> PreTrainedTokenizerBase:
    """``bytes``, or a fast Hugging Face tokenizer by its name on the Hub or its local path.

    Args:
        name: of the tokenizer.
        local: whether to look on this machine alone.

    Raises:
        ValueError: if it cannot be loaded, is not a fast tokenizer or has no end-of-text token.
    """
    if name == "bytes":
        return byte_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=local
        )
    except Exception as error:  # transformers lets those of its parsers through
        raise ValueError(
            f"Cannot load the tokenizer {name!r}: give 'bytes', a local folder or a name on the "
            f"Hugging Face Hub. ({error})"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"The tokenizer {name!r} has no fast version (tokenizer.json).")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer {name!r} has no end-of-text token to end documents with.")
    return tokenizer
