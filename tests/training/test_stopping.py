"""Wishes to stop: what asks, what is asked for twice, what is passed over."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import softmax_rnn.training.stopping as stopping
from processes import ended, program
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.training.stopping import RunStopped, StopRequest, foremost, seconds
from tiny import tiny


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1h50m", 6600), ("2d", 172800), ("90s", 90), ("0.5s", 0.5), ("1d2h3m4s", 93784)],
)
def test_durations(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "90", "1h50", "m", "0s", "-1h", "1h 50m", "50m1h"])
def test_what_is_no_duration_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"written as in 2d, 1h50m or 90s, not"):
        seconds(text)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_wish_is_raised_until_it_is_deferred(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopRequest(), pytest.raises(RunStopped, match=f"^Stopped by {name}$") as stopped:
        signal.raise_signal(number)
    assert stopped.value.code == number
    with StopRequest() as stop:
        stop.defer()
        assert stop.code == 0
        signal.raise_signal(number)
        assert stop.code == number
    assert signal.getsignal(number) == before


def test_what_announces_the_end_is_not_the_first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends SIGUSR1 long before SIGTERM, and SIGTERM to every process of a job."""
    clock = itertools.accumulate((0.0, 2 * stopping._AGAIN, 0.0))
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with StopRequest() as stop:
        stop.defer()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # passed on by a parent
        assert stop.code == signal.SIGUSR1


def test_the_signal_of_a_scheduler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where SIGTERM comes first: after it the run is queued again."""
    for first, second in itertools.permutations((signal.SIGTERM, signal.SIGUSR2)):
        with StopRequest() as stop:
            stop.defer()
            signal.raise_signal(first)
            signal.raise_signal(second)
            assert stop.code == signal.SIGUSR2
    codes = (0, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM)
    assert foremost(codes) == signal.SIGUSR2
    assert foremost((0, 0)) == 0


def test_a_signal_that_comes_last_still_counts() -> None:
    """While the first one is on its way out."""

    def late() -> None:
        with StopRequest() as stop:
            stop.defer()
            on_its_way = RunStopped(signal.SIGTERM, "after step 7")
            signal.raise_signal(signal.SIGUSR2)
            raise on_its_way

    with pytest.raises(RunStopped) as stopped:
        late()
    assert stopped.value.code == signal.SIGUSR2


def test_time_is_a_wish_like_others() -> None:
    with StopRequest(3600.0) as stop:
        stop.defer()
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600
        signal.raise_signal(signal.SIGALRM)
        assert stop.code == signal.SIGALRM
    assert str(RunStopped(stop.code, "here")) == "Stopped by its time limit here"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # no alarm is left


def test_what_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_gets_no_signals() -> None:
    found: list[object] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with StopRequest():
            found.append(signal.getsignal(signal.SIGTERM) == before)
        try:
            StopRequest(1.0).__enter__()
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True, "A time limit needs the main thread."]


def test_the_same_wish_again_does_not_disturb_the_end(texts: Path, tmp_path: Path) -> None:
    """A scheduler sends SIGTERM, and a parent passes it on, to a process that has saved."""
    tiny(texts, steps=100_000).save(tmp_path / "config.yaml")
    words = ["train", "--out", str(tmp_path / "run"), "--config", str(tmp_path / "config.yaml")]
    code = "import sys; from softmax_rnn.cli.main import process; sys.argv[1:] = "
    patient = "from softmax_rnn.training import stopping; stopping._AGAIN = 3600.0; "
    process = program(f"{patient}{code}{words}; process()", tmp_path)
    while process.is_alive() and not (tmp_path / "run" / "checkpoint-4").exists():
        time.sleep(0.01)
    signals = itertools.cycle((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    while process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, next(signals))
        time.sleep(0.005)
    code, told = ended(process), (tmp_path / "log").read_text()
    assert code == ExitCode.STOPPED, told
    assert "saved in checkpoint-" in told


def test_a_duration_that_no_timer_takes_is_named() -> None:
    with pytest.raises(ValueError, match="at most 10000 days, not '99999999999999d'"):
        seconds("99999999999999d")
