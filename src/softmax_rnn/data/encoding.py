"""Text to tokens, by several threads, in the order of the text."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from softmax_rnn.data.source import Part

_CHARACTERS, _PARTS = 2**20, 4096  # of a chunk, whichever is reached first
_AHEAD = 4  # chunks waiting for each thread
AT_ONCE = 8  # passages in a call: what is known of more leaves a core's cache
_PARALLELISM = "TOKENIZERS_PARALLELISM"

Encoded = tuple[NDArray[Any], NDArray[np.int64]]  # tokens, and how many each passage has


@dataclass(frozen=True)
class Encoder:
    """A fast tokenizer, without what its file says of truncation and padding.

    Attributes:
        definition: the tokenizer's JSON.
        end: id that ends every document.
        dtype: of the tokens.
    """

    definition: str
    end: int
    dtype: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        """The encoder of a fast tokenizer with an end-of-text token."""
        if not tokenizer.is_fast or tokenizer.eos_token_id is None:
            raise ValueError("A corpus needs a fast tokenizer with an end-of-text token.")
        plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        plain.no_truncation()  # some are saved with it, and would cut documents without a word
        plain.no_padding()
        return cls(plain.to_str(), tokenizer.eos_token_id, _dtype(vocabulary(tokenizer)))

    def start(self) -> Tokenizer:
        """The tokenizer itself."""
        return Tokenizer.from_str(self.definition)

    def encode(self, tokenizer: Tokenizer, chunk: Sequence[Part]) -> Encoded:
        """The tokens of all passages end to end, with ``end`` after those that end a document."""
        pieces, end = [], np.array([self.end], dtype=self.dtype)
        lengths = np.empty(len(chunk), dtype=np.int64)
        for index, (part, encoding) in enumerate(
            zip(chunk, _encodings(tokenizer, chunk), strict=True)
        ):
            pieces.append(np.array(encoding.ids, dtype=self.dtype))
            lengths[index] = len(pieces[-1]) + part.ends
            if part.ends:
                pieces.append(end)
        return np.concatenate(pieces), lengths


def _encodings(tokenizer: Tokenizer, chunk: Sequence[Part]) -> Iterator[Encoding]:
    for first in range(0, len(chunk), AT_ONCE):
        texts = [part.text for part in chunk[first : first + AT_ONCE]]
        yield from tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding needs for every id; ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _dtype(rows: int) -> str:
    return "uint16" if rows <= 2**16 else "uint32"


def chunks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Passages in lists that are worth sending."""
    chunk: list[Part] = []
    characters = 0
    for part in parts:
        chunk.append(part)
        characters += len(part.text)
        if characters >= _CHARACTERS or len(chunk) >= _PARTS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def encode_all(
    encoder: Encoder, work: Iterable[list[Part]], workers: int
) -> Generator[tuple[list[Part], Encoded], None, None]:
    """Every chunk with its tokens, in order.

    Args:
        encoder: the tokenizer.
        work: chunks of passages.
        workers: threads that tokenise, outside Python's lock: all but a twentieth of the work.
    """
    tokenizer = encoder.start()
    waiting: deque[tuple[list[Part], Future[Encoded]]] = deque()
    with _parallelism_off:
        pool = ThreadPoolExecutor(workers, "tokenise")
        try:
            for chunk in work:
                waiting.append((chunk, pool.submit(encoder.encode, tokenizer, chunk)))
                if len(waiting) >= _AHEAD * workers:
                    done, encoded = waiting.popleft()
                    yield done, encoded.result()
            while waiting:
                done, encoded = waiting.popleft()
                yield done, encoded.result()
        finally:
            pool.shutdown(cancel_futures=True)


class _ParallelismOff:
    """While any caller is within, the tokenizers' own threads (one a core a call) are off."""

    def __init__(self) -> None:
        self.lock, self.callers = threading.Lock(), 0
        self.before: str | None = None

    def __enter__(self) -> None:
        with self.lock:
            if not self.callers:
                self.before = os.environ.get(_PARALLELISM)
                os.environ[_PARALLELISM] = "false"
            self.callers += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.callers -= 1
            if self.callers:
                return
            os.environ.pop(_PARALLELISM, None)
            if self.before is not None:
                os.environ[_PARALLELISM] = self.before


_parallelism_off = _ParallelismOff()
