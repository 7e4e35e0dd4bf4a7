"""How many bytes of text every token stands for."""

from __future__ import annotations

import json
import re

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES = frozenset(bytes_to_unicode().values())  # the characters that byte-level tokens consist of
_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


def text_bytes(tokenizer: PreTrainedTokenizerBase, ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """The number of UTF-8 bytes that every token adds to the text of its row.

    It is the length of the decoded text, so that the numbers of a document add up to the bytes of
    its text. A byte-level token counts its own bytes, also if they are a part of a character, which
    cannot be decoded alone; so does a byte of SentencePiece's fallback. A space that the tokenizer
    adds before a document, and removes when it decodes, does not count. Special tokens, such as the
    end of a text, count 0.

    Args:
        tokenizer: a fast tokenizer; its end-of-text token ends each document.
        ids: [N, T] token ids.

    Returns:
        [N, T - 1]: of every token but the first of its row.
    """
    backend = tokenizer.backend_tokenizer
    kinds, added = _kinds(backend), backend.get_added_tokens_decoder()
    unique, places = np.unique(ids, return_inverse=True)
    table = np.array([_bytes(backend, token, kinds, added.get(token)) for token in unique.tolist()])
    first, later = np.moveaxis(table[places.reshape(ids.shape)], -1, 0)
    return np.where(ids[:, :-1] == tokenizer.eos_token_id, first[:, 1:], later[:, 1:])


def _bytes(
    tokenizer: Tokenizer, token: int, kinds: frozenset[str], added: AddedToken | None
) -> tuple[int, int]:
    """The bytes of a token at the start of a document, and after other tokens."""
    piece = tokenizer.id_to_token(token)
    if piece is None or (added is not None and added.special):
        return 0, 0
    if added is not None:
        count = len(added.content.encode())
    elif "ByteLevel" in kinds:
        count = sum(1 if char in _BYTES else len(char.encode()) for char in piece)
    elif "ByteFallback" in kinds and _FALLBACK.fullmatch(piece):
        count = 1
    else:  # a decoder may treat the first token of a text in another way
        once, twice = (len(tokenizer.decode([token] * n).encode()) for n in (1, 2))
        return once, twice - once
    return count, count


def _kinds(tokenizer: Tokenizer) -> frozenset[str]:
    """The names of the steps of a tokenizer's decoder."""
    if tokenizer.decoder is None:
        return frozenset()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(step["type"] for step in decoder.get("decoders", [decoder]))
