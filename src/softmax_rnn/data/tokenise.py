"""Convert text to tokens in several threads, in the order of the text."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from softmax_rnn.data.readers import Passage

_CHARACTERS, _PASSAGES = 2**20, 4096  # limits of a chunk
_AHEAD = 4  # chunks read ahead for each thread
BATCH = 8  # passages per call; larger batches exceed a core's cache and are slower

Encoded = tuple[NDArray[Any], NDArray[np.int64]]  # tokens, and their number in each passage


class Encoder:
    """A fast tokenizer without truncation and padding."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast or tokenizer.eos_token_id is None:
            raise ValueError("A corpus needs a fast tokenizer with an end-of-text token.")
        self.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_truncation()  # some are saved with truncation, which would cut documents
        self.tokenizer.no_padding()
        self.definition = self.tokenizer.to_str()
        self.end = tokenizer.eos_token_id  # ends each document
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, chunk: Sequence[Passage]) -> Encoded:
        """The tokens of all passages, concatenated, with ``end`` after each document."""
        pieces: list[NDArray[Any]] = []
        for first in range(0, len(chunk), BATCH):
            batch = chunk[first : first + BATCH]
            texts = [passage.text for passage in batch]
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for passage, encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids + [self.end] * passage.ends
                pieces.append(np.array(ids, dtype=self.dtype))
        return np.concatenate(pieces), np.array([len(piece) for piece in pieces], dtype=np.int64)


def chunks(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    """Lists of passages; each list is enough work for a thread."""
    chunk: list[Passage] = []
    characters = 0
    for passage in passages:
        chunk.append(passage)
        characters += len(passage.text)
        if characters >= _CHARACTERS or len(chunk) >= _PASSAGES:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def encode_all(
    encoder: Encoder, work: Iterable[list[Passage]], workers: int
) -> Generator[tuple[list[Passage], Encoded], None, None]:
    """Each chunk with its tokens, in order; few chunks are read ahead.

    The tokenizer releases the GIL during 95% of its time.
    """
    waiting: deque[tuple[list[Passage], Future[Encoded]]] = deque()
    with _single_threaded_calls():
        pool = ThreadPoolExecutor(workers, "tokenise")
        try:
            for chunk in work:
                waiting.append((chunk, pool.submit(encoder.encode, chunk)))
                if len(waiting) >= _AHEAD * workers:
                    done, encoded = waiting.popleft()
                    yield done, encoded.result()
            while waiting:
                done, encoded = waiting.popleft()
                yield done, encoded.result()
        finally:
            pool.shutdown(cancel_futures=True)


_PARALLELISM = "TOKENIZERS_PARALLELISM"
_callers_lock = threading.Lock()
_callers: list[str | None] = []  # for each caller, the setting before the first


@contextlib.contextmanager
def _single_threaded_calls() -> Iterator[None]:
    """Turn off the tokenizers' own threads (one per core and call) during this block."""
    with _callers_lock:
        _callers.append(_callers[0] if _callers else os.environ.get(_PARALLELISM))
        os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        with _callers_lock:
            before = _callers.pop()
            if not _callers:
                os.environ.pop(_PARALLELISM, None)
                if before is not None:
                    os.environ[_PARALLELISM] = before
