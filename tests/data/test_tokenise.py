"""Tokens by several threads: in order, and with nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from softmax_rnn.data.readers import Passage
from softmax_rnn.data.tokenise import BATCH, Encoder, chunks, encode_all
from softmax_rnn.data.tokenizer import byte_tokenizer

ENCODER = Encoder(byte_tokenizer())
OWN_THREADS = "TOKENIZERS_PARALLELISM"


def passages(count: int, texts: int = BATCH + 3) -> list[list[Passage]]:
    """Chunks of passages, every other one of which ends a document."""
    return [
        [Passage(f"{chunk}:{text} é", text % 2 == 1) for text in range(texts)]
        for chunk in range(count)
    ]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokenise")]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_order_is_that_of_the_work(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Encoder.encode

    def encode(self: Encoder, chunk: list[Passage]) -> Any:
        time.sleep(0.02 * chunk[0].text.startswith(("0:", "3:")))  # the next ones are done before
        return original(self, chunk)

    monkeypatch.setattr(Encoder, "encode", encode)
    work = passages(17)
    found = list(encode_all(ENCODER, iter(work), workers))
    assert [chunk for chunk, _ in found] == work
    for chunk, (ids, lengths) in found:
        expected = [[*part.text.encode(), *[256] * part.ends] for part in chunk]
        assert lengths.tolist() == [len(each) for each in expected]
        np.testing.assert_array_equal(ids, np.concatenate(expected))
    assert not threads()


@pytest.mark.parametrize("before", [None, "true", "false"])
def test_a_worker_is_one_thread(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizers' own parallelism is off meanwhile, and then as it was."""
    if before is None:
        monkeypatch.delenv(OWN_THREADS)
    else:
        monkeypatch.setenv(OWN_THREADS, before)
    for _ in encode_all(ENCODER, iter(passages(3)), 2):
        assert os.environ[OWN_THREADS] == "false"
        assert len(threads()) == 2
    assert os.environ.get(OWN_THREADS) == before


@pytest.mark.parametrize("before", [None, "true"])
def test_two_at_once_leave_no_trace(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(OWN_THREADS)
    else:
        monkeypatch.setenv(OWN_THREADS, before)
    first, second = (encode_all(ENCODER, iter(passages(20)), 1) for _ in range(2))
    next(first)
    next(second)
    first.close()
    assert os.environ[OWN_THREADS] == "false"
    second.close()
    assert os.environ.get(OWN_THREADS) == before


def test_whoever_stops_listening_waits_for_what_is_under_way_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    cancelled = threading.Event()
    original, shutdown = Encoder.encode, ThreadPoolExecutor.shutdown

    def encode(self: Encoder, chunk: list[Passage]) -> Any:
        begun.append(chunk[0].text)
        if len(begun) > 1:
            cancelled.wait()
        return original(self, chunk)

    def cancel(self: ThreadPoolExecutor, *, cancel_futures: bool) -> None:
        shutdown(self, wait=False, cancel_futures=cancel_futures)
        cancelled.set()
        shutdown(self)

    monkeypatch.setattr(Encoder, "encode", encode)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", cancel)
    results = encode_all(ENCODER, iter(passages(50)), 1)
    next(results)
    results.close()
    assert len(begun) <= 2
    assert not threads()


def test_what_fails_in_a_thread_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Encoder, chunk: list[Passage]) -> Any:
        raise MemoryError("no memory for 3:0")

    monkeypatch.setattr(Encoder, "encode", fail)
    with pytest.raises(MemoryError, match="3:0"):
        list(encode_all(ENCODER, iter(passages(5)), 2))
    assert not threads()


def test_little_work_is_read_ahead() -> None:
    """A corpus larger than memory is not read ahead."""
    read = 0

    def work() -> Iterator[list[Passage]]:
        nonlocal read
        for chunk in passages(100):
            read += 1
            yield chunk

    results = encode_all(ENCODER, work(), 2)
    next(results)
    results.close()
    assert read <= 8


def test_chunks_keep_every_passage() -> None:
    work = [Passage("x" * 300_000, True)] * 9 + [Passage("y", True)] * 9000
    found = list(chunks(work))
    assert [passage for chunk in found for passage in chunk] == work
    assert max(map(len, found)) <= 4096
    assert max(sum(len(passage.text) for passage in chunk) for chunk in found) < 2**20 + 300_000
