"""The progress bar where there is no terminal, and on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from softmax_rnn._utils import progress
from softmax_rnn._utils.progress import ProgressBar, notice
from softmax_rnn._utils.units import bytes_text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the bar reads, to be set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_a_minute_without_a_terminal(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("run[0]", total=200) as bar:
        for step in range(1, 181):
            clock[0] = float(step)
            bar.update(step, f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("%")[0] for line in lines] == ["run[0]: 30", "run[0]: 60", "run[0]: 90"]
    assert "loss 60" in lines[0]


def test_nothing_is_shown_where_another_process_shows_it(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("run", total=2, visible=False) as bar:
        clock[0] = 100.0
        bar.update(1)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_the_messages_above(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress, "console", terminal)
    with ProgressBar("run[0]", total=4) as bar:
        bar.update(1, "loss 2.500")
        notice("Step 1: a [message] of its own.")
        bar.update(4, "loss 2.400")
    shown = screen.getvalue()
    assert "Step 1: a [message] of its own." in shown
    assert "run[0]" in shown
    assert "100% loss 2.400" in shown


def test_another_label_starts_the_bar_anew(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("checking", total=1.0) as bar:
        bar.update(0.9)
        clock[0] = 61.0
        bar.update(0.1, total=1.0, label="tokenising")
    assert capsys.readouterr().err.startswith("tokenising: 10%")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (39_653_978.2 * 1024, "37.8 GiB"),
        (2.0**40 * 5000, "5,000.0 TiB"),
    ],
)
def test_sizes_have_the_unit_that_fits(size: float, text: str) -> None:
    assert bytes_text(size) == text
