"""The machine's speeds: measured, kept, read, and never more than a matter of time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import softmax_rnn as sr
from softmax_rnn.ops import calibration, speeds
from softmax_rnn.ops.cost import Sizes, chunk_length, chunked_cost, cost_of_pairs
from softmax_rnn.ops.forms import native_library
from softmax_rnn.ops.speeds import SHIPPED, Speeds, Work


@pytest.fixture
def measurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and measured speeds count."""
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path))
    monkeypatch.delenv(speeds.VARIABLE)
    speeds._read.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    speeds._read.cache_clear()


def test_what_is_measured_is_kept_and_read(
    measurable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speeds.speeds("torch") == SHIPPED["torch"]
    path = calibration.calibrate()
    found = speeds.speeds("torch")
    assert found != SHIPPED["torch"]
    for engine in ("torch", "native") if native_library.possible() else ("torch",):
        for work in speeds.speeds(engine):
            assert all(0 <= x < 1e9 for x in work)
    data = json.loads(path.read_text())
    assert Work(**data["nanoseconds"]["torch"]["pairs"]) == found.pairs
    # Another number of threads is another machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert speeds.file() != path
    assert speeds.speeds("torch") == SHIPPED["torch"]
    torch.set_num_threads(threads)
    assert speeds.speeds("torch") == found
    monkeypatch.setenv(speeds.VARIABLE, "shipped")
    assert speeds.speeds("torch") == SHIPPED["torch"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"nanoseconds": 3}', '{"nanoseconds": {"torch": {"pairs": {}}}}'),
        *("broken", "[" * 200_000),
    ],
    ids=repr,
)
def test_a_file_that_says_nothing_is_left_out(measurable: None, text: str) -> None:
    speeds.file().write_text(text)
    assert speeds.speeds("torch") == SHIPPED["torch"]


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text(" " * 2_000_000 + "{}"),
        lambda path: path.write_bytes(b"\xff"),
    ],
    ids=["a pipe", "a folder", "a device", "too long", "no text"],
)
def test_what_is_no_file_of_numbers_is_left_out(
    measurable: None, make: Callable[[Path], object]
) -> None:
    """Others may write in a cache; nothing there may keep a process waiting."""
    make(speeds.file())
    assert speeds.speeds("torch") == SHIPPED["torch"]


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf"), 10**400], ids=str)
def test_numbers_that_are_no_times_are_left_out(measurable: None, number: float) -> None:
    work = SHIPPED["torch"].pairs._asdict() | {"pair": number}
    parts = {"pairs": work, "chunks": SHIPPED["torch"].chunks._asdict()}
    speeds.file().write_text(json.dumps({"nanoseconds": {"torch": parts}}))
    assert speeds.speeds("torch") == SHIPPED["torch"]


def test_the_fit_finds_the_times_of_a_machine() -> None:
    """Of a machine twice as slow in all, with products four times as slow."""
    shipped = SHIPPED["native"].chunks
    own = Work(*(2 * x for x in shipped))._replace(multiply=4 * shipped.multiply)
    samples = calibration._Samples()
    for length, width, order, chunk in (*calibration._CHUNKS, (4096, 8, 1, 64)):
        work = calibration.work_of_chunks(calibration._sizes(length, width, order, "native"), chunk)
        samples.works.append(work)
        samples.times.append(work.time(own))
    found = samples.fitted(shipped)
    assert found.multiply == pytest.approx(own.multiply, rel=0.1)
    for work, time in zip(samples.works, samples.times, strict=True):
        assert work.time(found) == pytest.approx(time, rel=0.05)


@pytest.mark.parametrize("number", [0.0, 1e-9, 1e9])
def test_bad_numbers_cost_time_alone(measurable: None, number: float) -> None:
    """Whatever the speeds are, the result is right."""
    bad = Speeds(SHIPPED["torch"].pairs, Work(*(number for _ in Work._fields)))
    speeds.save({"torch": bad, "native": bad})
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 8, generator=draw, dtype=torch.float64)
    expected = sr.attention(q, k, v, "taylor:2", form="dense")
    torch.testing.assert_close(sr.attention(q, k, v, "taylor:2"), expected)
    sizes = Sizes(sr.variant("taylor:2"), 300, 300, 8, 8)
    assert chunk_length(sizes) in (64, 128, 256, 512)
    cheaper = chunked_cost(sizes) < cost_of_pairs(sizes, "torch")
    assert cheaper == (number < 1)
