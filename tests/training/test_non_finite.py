"""Losses and gradients that are not finite, and losses that leap."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softmax_rnn.training import train
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.loop import Loop, NonFiniteError
from softmax_rnn.training.metrics import MetricRows, loss_spikes, spike_starts
from tiny import assert_same_run, tiny


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_stops_before_the_update(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At step 7 the loss, or only its gradient, becomes infinite."""
    config = tiny(texts)
    original = Loop.gradients

    def step(self: Any) -> float:
        loss = original(self)
        if self.step == 6:
            if where == "loss":
                return loss * float("inf")
            next(self.model.parameters()).grad[0] = float("nan")
        return loss

    monkeypatch.setattr(Loop, "gradients", step)
    with pytest.raises(NonFiniteError, match=r"of step 7 is (inf|nan).*checkpoint-4"):
        train(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert [path.name for path in folder.checkpoints] == ["checkpoint-4"]
    assert not folder.finished
    monkeypatch.undo()
    assert_same_run(train(config, folder.path, resume=True), train(config, tmp_path / "well"))


@pytest.mark.parametrize("bad", [{1, 2, 3, 4}, {5}, {7, 8}, {11, 12}])
def test_steps_that_are_not_finite_may_be_skipped(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int]
) -> None:
    """They change no weight and enter no mean; resumed in their midst, the run is the same."""
    config = tiny(texts, skip_non_finite=4, keep_checkpoints=9)
    original = Loop.gradients
    weight_before: dict[int, torch.Tensor] = {}
    spent: list[float] = []

    def step(self: Any) -> float:
        began = time.perf_counter()
        loss = original(self)
        spent.append(time.perf_counter() - began)
        now = self.step + 1
        weight_before[now] = self.model.lm_head.weight.detach().clone()
        if now not in bad:
            return loss
        if now % 2:
            return loss * float("nan")
        next(self.model.parameters()).grad[0] = float("inf")
        return loss

    monkeypatch.setattr(Loop, "gradients", step)
    folder = train(config, tmp_path / "run")
    for now in range(2, 12):
        same = torch.equal(weight_before[now], weight_before[now + 1])
        assert same == (now in bad), now
    assert [row["step"] for row in folder.events] == sorted(bad)
    assert folder.events[0]["event"] == "non_finite"
    assert folder.summary["skipped_steps"] == len(bad)
    assert folder.summary["tokens"] == 12 * config.tokens_per_step
    assert folder.summary["seconds"] >= sum(spent)
    assert list(folder.metrics.step) == list(range(2, 13, 2))
    updates = [not {step - 1, step} <= bad for step in folder.metrics.step]
    assert folder.metrics.loss.notna().tolist() == updates
    assert folder.metrics.loss[updates].between(1, 10).all()
    assert 1 < folder.summary["train_loss"] < 10
    shutil.copytree(folder.path, tmp_path / "cut")
    cut = RunFolder(tmp_path / "cut")
    (cut.path / "summary.json").unlink()
    for path in cut.checkpoints[1:]:
        shutil.rmtree(path)
    assert_same_run(train(config, cut.path, resume=True), folder)
    assert cut.events == folder.events


def test_a_step_that_overflows_is_one_that_is_not_finite(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form raises where sums are beyond their type; the run says so, or skips the step."""
    original = Loop.gradients

    def step(self: Any) -> float:
        query = self.model.model.layers[0].self_attn.q_proj.weight
        kept = query.detach().clone()
        if self.step == 4:
            query.data.fill_(1e30)
        try:
            return original(self)
        finally:
            query.data.copy_(kept)

    monkeypatch.setattr(Loop, "gradients", step)
    config = tiny(texts, attention="taylor:4")
    with pytest.raises(NonFiniteError, match="step 5 is nan: The sums of power 4 overflow"):
        train(config, tmp_path / "run")
    folder = train(tiny(texts, attention="taylor:4", skip_non_finite=1), tmp_path / "skips")
    assert [row["step"] for row in folder.events] == [5]


def test_documents_are_counted_once_though_steps_are_skipped(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a step that was skipped and then evaluated."""
    fields = {"packing": "documents", "log_every": 1, "evaluate_every": 3, "save_every": 3}
    expected = train(tiny(texts, **fields), tmp_path / "well")
    original = Loop.gradients

    def step(self: Any) -> float:
        loss = original(self)
        return loss * float("nan") if self.step in (2, 5, 6) else loss

    monkeypatch.setattr(Loop, "gradients", step)
    found = train(tiny(texts, skip_non_finite=2, **fields), tmp_path / "run")
    assert found.summary["tokens"] == expected.summary["tokens"]
    assert found.evaluations.tokens.equals(expected.evaluations.tokens)
    assert found.metrics.tokens.equals(expected.metrics.tokens)


def test_a_run_without_any_update_has_no_results(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Loop.gradients
    monkeypatch.setattr(Loop, "gradients", lambda self: original(self) * float("nan"))
    with pytest.raises(NonFiniteError, match="None of the 12 steps made an update"):
        train(tiny(texts, skip_non_finite=12), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").finished
    assert RunFolder(tmp_path / "run").diverged


def test_one_step_too_many_that_is_not_finite_stops(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger --skip_non_finite then goes on: of all settings it may change."""
    original = Loop.gradients

    def step(self: Any) -> float:
        loss = original(self)
        return loss * float("nan") if 5 <= self.step < 8 else loss

    monkeypatch.setattr(Loop, "gradients", step)
    with pytest.raises(NonFiniteError, match="loss of step 8 is nan.*, with 2 steps skipped in a"):
        train(tiny(texts, skip_non_finite=2), tmp_path / "run")
    assert RunFolder(tmp_path / "run").diverged
    folder = train(tiny(texts, skip_non_finite=3), tmp_path / "run", resume=True)
    assert folder.summary["skipped_steps"] == 3
    assert not folder.diverged
    assert [row["event"] for row in folder.events] == ["non_finite"] * 3
    assert RunFolder(folder.path).config.skip_non_finite == 3


def test_leaps_of_the_loss_are_logged(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After step 20 a person turns the output layer round."""
    original = Loop.gradients

    def step(self: Any) -> float:
        if self.step == 20:
            with torch.no_grad():
                self.model.lm_head.weight *= -5
        return original(self)

    monkeypatch.setattr(Loop, "gradients", step)
    folder = train(tiny(texts, steps=24, log_every=1, learning_rate=1e-4), tmp_path / "run")
    (event,) = folder.events
    assert event["event"] == "loss_spike"
    assert event["step"] == 21
    assert event["loss"] > event["usual"] + 0.2
    assert folder.summary["loss_spikes"] == loss_spikes(folder.metrics.loss) == 1
    assert "Step 21: the training loss rose to" in capsys.readouterr().err


def test_every_leap_is_seen_as_it_comes(tmp_path: Path) -> None:
    """Row by row the same leaps are found as in all rows at the end."""
    draw = np.random.default_rng(0)
    losses = draw.normal(3, 0.02, 300) + 2 * (draw.random(300) < 0.1)
    folder = RunFolder(tmp_path)
    rows = MetricRows(tiny(tmp_path), folder, lambda start, stop: stop - start)
    for step, loss in enumerate(losses, start=1):
        rows.seconds, rows.steps = 1.0, 1
        rows.add(step, loss, learning_rate=1.0, grad_norm=1.0)
    starts = spike_starts(folder.metrics.loss)
    assert 5 < starts.sum() < 40
    assert [row["step"] for row in folder.events] == list(folder.metrics.step[starts])


def test_a_test_loss_that_is_not_finite_stops(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np, "average", lambda *_, **__: float("nan"))
    with pytest.raises(NonFiniteError, match="The test loss after step 6 is nan"):
        train(tiny(texts), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").finished
    assert RunFolder(tmp_path / "run").diverged
