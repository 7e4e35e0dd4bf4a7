"""The progress bar where there is no terminal, and on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from softmax_rnn._utils import progress
from softmax_rnn._utils.progress import ProgressBar, notice


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
