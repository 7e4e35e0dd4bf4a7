"""Text to tokens, in this process or in several, in the order of the text."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from softmax_rnn.data.source import Part

_CHARACTERS, _PARTS = 2**20, 4096  # of a chunk, whichever is reached first
# A process takes seconds to start: with less text than this many chunks, none is started.
_WORTHWHILE = 16
_AHEAD = 4  # chunks waiting for each process

Encoded = tuple[NDArray[Any], NDArray[np.int64]]  # tokens, and how many each passage has


@dataclass(frozen=True)
class Encoder:
    """A fast tokenizer as plain data, to be sent to processes.

    Attributes:
        definition: the tokenizer's JSON, without truncation and padding.
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

    def encode(self, tokenizer: Tokenizer, texts: Sequence[str], ends: Sequence[bool]) -> Encoded:
        """The tokens of all passages end to end, with ``end`` after those that end a document."""
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        pieces, end = [], np.array([self.end], dtype=self.dtype)
        lengths = np.empty(len(texts), dtype=np.int64)
        for index, encoding in enumerate(encodings):
            pieces.append(np.array(encoding.ids, dtype=self.dtype))
            lengths[index] = len(pieces[-1]) + ends[index]
            if ends[index]:
                pieces.append(end)
        return np.concatenate(pieces), lengths


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
    encoder: Encoder, work: Iterator[list[Part]], workers: int
) -> Generator[tuple[list[Part], Encoded], None, None]:
    """Every chunk with its tokens, in order.

    Args:
        encoder: the tokenizer.
        work: chunks of passages.
        workers: processes; with 1, or little work, this one alone.

    Raises:
        ChildProcessError: if a process dies.
    """
    first = list(itertools.islice(work, _WORTHWHILE)) if workers > 1 else []
    if len(first) < _WORTHWHILE:
        tokenizer = encoder.start()
        for chunk in itertools.chain(first, work):
            yield chunk, encoder.encode(tokenizer, *_sent(chunk))
        return
    context = multiprocessing.get_context("spawn")  # forking would copy locks of running threads
    pool = ProcessPoolExecutor(workers, context, _begin, (encoder,))
    waiting: deque[tuple[list[Part], Future[Encoded]]] = deque()
    try:
        for chunk in itertools.chain(first, work):
            waiting.append((chunk, pool.submit(_encode, *_sent(chunk))))
            if len(waiting) >= _AHEAD * workers:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "A tokenising process ended before its work. If memory ran out, take fewer workers; "
            "in a script, the call must stand below `if __name__ == '__main__':`. Finished shards "
            "are kept."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _sent(chunk: list[Part]) -> tuple[list[str], list[bool]]:
    return [part.text for part in chunk], [part.ends for part in chunk]


_worker: tuple[Encoder, Tokenizer]  # of this process


def _begin(encoder: Encoder) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = encoder, encoder.start()


def _end_with_parent() -> None:
    """A killed parent leaves no process behind that waits for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(texts: list[str], ends: list[bool]) -> Encoded:
    encoder, tokenizer = _worker
    return encoder.encode(tokenizer, texts, ends)
