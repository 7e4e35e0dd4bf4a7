"""The bar of a run: the time of evaluations is a part of it."""

from __future__ import annotations

import pytest

from softmax_rnn._utils import progress
from softmax_rnn.training import RunConfig
from softmax_rnn.training.work import RunBar


@pytest.mark.parametrize("every", [10, 20, 50, 100])
def test_the_time_left_includes_evaluations(
    every: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a row trains three times as long as it is tested, the time left is right throughout."""
    config = RunConfig(steps=40, batch_size=4, evaluate_every=every)
    now, told = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    tests = [step for step in range(1, 41) if step % every == 0 or step == 40]
    whole = 40 * 4 * 3 + len(tests) * 100
    bar = RunBar("run", config, 100, 0, visible=True)
    bar._progress.get_time = lambda: now[0]
    for step in range(1, 41):
        now[0] += 4 * 3
        bar.trained(step, "loss 1")
        told.append(whole - now[0])
        if step in tests:
            for share in (0.25, 0.5, 1.0):
                now[0] += 50 if share == 1 else 25
                bar.tested(step, share)
                told.append(whole - now[0])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    assert "100%" not in "".join(lines[:-1])
    assert "100%, step 40 of 40 evaluating, 0 min 0 s left" in lines[-1]
    for line, expected in list(zip(lines, told, strict=True))[2:]:
        minutes, seconds = line.removesuffix(" s left").rpartition(", ")[2].split(" min ")
        assert 60 * int(minutes) + int(seconds) == pytest.approx(expected, abs=2), line


def test_a_resumed_run_starts_where_it_was() -> None:
    config = RunConfig(steps=40, batch_size=4, evaluate_every=10)
    there, here = (RunBar("run", config, 100, step, visible=False) for step in (0, 30))
    there.trained(30, "")
    assert there._progress.tasks[0].completed == here._progress.tasks[0].completed == 30 * 12 + 200
