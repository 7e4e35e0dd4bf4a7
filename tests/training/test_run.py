"""One run: what it leaves, that it repeats itself, that it survives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import softmax_rnn.training.environment as environment_module
import softmax_rnn.training.loop as loop_module
import softmax_rnn.training.run as run_module
from softmax_rnn._utils import progress
from softmax_rnn._utils.integrity import seal
from softmax_rnn.data import TokenBlocks, load_tokenizer, prepare
from softmax_rnn.training import train
from softmax_rnn.training.folder import RunFolder
from tiny import TIMED, assert_same_run, tiny


def test_a_run_leaves_what_it_says(texts: Path, tmp_path: Path) -> None:
    config = tiny(texts, attention="gate", steps=13)
    folder = train(config, tmp_path / "run")
    assert folder.config == config
    assert list(folder.metrics.step) == [2, 4, 6, 8, 10, 12, 13]
    assert list(folder.metrics.tokens) == [step * 128 for step in folder.metrics.step]
    assert set(folder.metrics) == {
        "step",
        "tokens",
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
    }
    assert list(folder.evaluations.step) == [6, 12, 13]
    assert [path.name for path in folder.checkpoints] == ["checkpoint-12", "checkpoint-13"]
    assert folder.summary["tokens"] == 13 * 128
    assert folder.environment["corpus"]["train"]["sha256"]
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    # Losses fall, and the tokenizer lies beside the weights.
    assert folder.metrics.loss.iloc[-1] < folder.metrics.loss.iloc[0]
    assert AutoTokenizer.from_pretrained(folder.checkpoints[-1]).eos_token_id == 256


def test_the_test_loss_is_the_mean_over_all_predicted_tokens(texts: Path, tmp_path: Path) -> None:
    """13 blocks in batches of 4: a mean of batch means would be another number."""
    config = tiny(texts)
    folder = train(config, tmp_path / "run")
    corpus = prepare(str(texts), load_tokenizer("bytes"), test_fraction=config.test_fraction)
    blocks = TokenBlocks(corpus, "test", config.block_size)
    assert len(blocks) % config.batch_size
    model = AutoModelForCausalLM.from_pretrained(folder.checkpoints[-1]).eval()
    expected = []
    with torch.no_grad():
        for block in blocks:  # type: ignore[attr-defined]
            ids = block["input_ids"]
            logits = model(ids[None]).logits[0, :-1]
            expected.append(F.cross_entropy(logits, ids[1:]).item())
    np.testing.assert_allclose(folder.test_losses, expected, rtol=1e-5)
    assert folder.summary["test_loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert folder.evaluations.test_loss.iloc[-1] == folder.summary["test_loss"]


def test_the_same_twice(texts: Path, tmp_path: Path) -> None:
    config = tiny(texts, attention="norm")
    assert_same_run(train(config, tmp_path / "a"), train(config, tmp_path / "b"))


def test_accumulation_changes_only_rounding(texts: Path, tmp_path: Path) -> None:
    whole = train(tiny(texts), tmp_path / "whole")
    parts = train(tiny(texts, accumulation=4), tmp_path / "parts")
    np.testing.assert_allclose(parts.metrics.loss, whole.metrics.loss, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "attention": "norm"},
        {"precision": "bf16"},
        {"num_kv_heads": 1},
    ],
)
def test_options_train(texts: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = train(tiny(texts, **options), tmp_path / "run")
    assert folder.metrics.loss.iloc[-1] < folder.metrics.loss.iloc[0]


def test_sharding_over_one_process_is_told(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(texts, steps=2), tmp_path / "plain")
    assert "fsdp" not in capsys.readouterr().err
    train(tiny(texts, steps=2, fsdp=True), tmp_path / "run")
    told = "fsdp=true shards nothing in a run of one process; to use N of them: torchrun"
    assert told in capsys.readouterr().err


def test_the_environment_does_not_choose_the_precision(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    original = Accelerator.__init__

    def start(self: Any, **options: Any) -> None:
        original(self, **options)
        found.append(self.mixed_precision)

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(Accelerator, "__init__", start)
    train(tiny(texts, steps=2), tmp_path / "run")
    assert found == ["no"]


def test_batches_without_a_token_to_predict_change_no_mean(tmp_path: Path) -> None:
    rows = [{"text": "" if i % 2 else "some text"} for i in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny(path, packing="documents", steps=2, evaluate_every=2, split_seed=0)
    folder = train(config, tmp_path / "run")  # documents of one token are in some batches
    assert folder.metrics.loss.notna().all()


def test_a_finished_run_is_not_run_again(texts: Path, tmp_path: Path) -> None:
    config = tiny(texts, steps=4, save_every=4)
    folder = train(config, tmp_path / "run")
    before = folder.metrics_file.stat().st_mtime_ns
    assert train(config, tmp_path / "run").summary == folder.summary
    assert folder.metrics_file.stat().st_mtime_ns == before


def test_another_configuration_is_refused(texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, steps=4, save_every=4), tmp_path / "run")
    with pytest.raises(ValueError, match=r"attention: 'softmax' there, 'norm' now; seed: 0 there"):
        train(tiny(texts, steps=4, save_every=4, attention="norm", seed=1), tmp_path / "run")


def test_an_unfinished_run_wants_resume(texts: Path, tmp_path: Path) -> None:
    config = tiny(texts)
    folder = train(config, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match="unfinished run: add --resume"):
        train(config, tmp_path / "run")
    assert train(config, tmp_path / "run", resume=True).summary["steps"] == folder.config.steps


def test_checkpoints_of_an_unknown_run_are_not_gone_on_from(texts: Path, tmp_path: Path) -> None:
    folder = train(tiny(texts), tmp_path / "run")
    folder.config_file.unlink()
    with pytest.raises(ValueError, match="run that has lost its config.yaml: restore it"):
        train(tiny(texts, attention="norm"), folder.path, resume=True)


def test_a_run_is_not_put_among_others(texts: Path, tmp_path: Path) -> None:
    """A table of this folder would have it as one more variant."""
    train(tiny(texts, steps=2), tmp_path / "softmax-seed0")
    with pytest.raises(ValueError, match=r"holds other runs \(softmax-seed0\), as a comparison"):
        train(tiny(texts), tmp_path)


@pytest.mark.parametrize("kept", [4, 12, 13])
def test_resumed_from_any_checkpoint_is_undisturbed(texts: Path, tmp_path: Path, kept: int) -> None:
    config = tiny(texts, attention="gate", steps=13, keep_checkpoints=9)
    expected = train(config, tmp_path / "undisturbed")
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "cut")
    cut = RunFolder(tmp_path / "cut")
    (cut.path / "summary.json").unlink()
    for path in cut.checkpoints:
        if int(path.name.split("-")[1]) > kept:
            shutil.rmtree(path)
    with cut.metrics_file.open("a") as file:
        file.write('{"step": 99, "to')  # what a kill leaves
    assert_same_run(train(config, cut.path, resume=True), expected)


def test_a_checkpoint_that_fails_half_way_does_not_count(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(texts)
    original = loop_module.write_state

    def full_disk(checkpoint: Path, *args: Any, **kwargs: Any) -> None:
        if checkpoint.name == "checkpoint-8":
            raise OSError(28, "No space left on device")
        original(checkpoint, *args, **kwargs)

    monkeypatch.setattr(loop_module, "write_state", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train(config, tmp_path / "run")
    left = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert left == ["checkpoint-4"]
    monkeypatch.undo()
    assert train(config, tmp_path / "run", resume=True).finished


def test_a_run_shorter_than_a_row_has_its_results(texts: Path, tmp_path: Path) -> None:
    folder = train(tiny(texts, steps=3, log_every=10, evaluate_every=10, save_every=10), tmp_path)
    assert list(folder.metrics.step) == [3]
    assert folder.summary["train_loss"] == folder.metrics.loss.iloc[0]
    assert folder.summary["seconds"] == pytest.approx(3 * 128 / folder.metrics[TIMED].iloc[0])


def test_another_corpus_under_the_same_name_is_refused(texts: Path, tmp_path: Path) -> None:
    config = tiny(texts, steps=4)
    folder = train(config, tmp_path / "run")
    (folder.path / "summary.json").unlink()
    before = (texts / "00.txt").read_text()
    (texts / "00.txt").write_text("other text\n")
    with pytest.raises(
        ValueError, match=r"run holds a run on other text: .*tokens.* there, .* now"
    ):
        train(config, folder.path, resume=True)
    (texts / "00.txt").write_text(before)
    train(config, folder.path, resume=True)
    (texts / "00.txt").write_text("other text\n")
    with pytest.raises(ValueError, match="run holds a run on other text"):
        train(config, folder.path)


def test_a_resumed_run_keeps_its_first_session_and_leaves_nothing_aside(
    texts: Path, tmp_path: Path
) -> None:
    config = tiny(texts, steps=8)
    folder = train(config, tmp_path / "run")
    first = folder.environment
    for session in (1, 2):
        (folder.path / "summary.json").unlink()
        shutil.rmtree(folder.checkpoints[-1])
        for name in (".checkpoint-8.123", ".checkpoint-8.parts"):
            (folder.path / name).mkdir()
        (folder.path / ".summary.json.123").write_text("{")
        train(config, folder.path, resume=True)
        later = folder.environment.pop("sessions")
        assert len(later) == session
        assert later[-1]["python"] == first["python"]
        assert {**folder.environment, "sessions": None} == {**first, "sessions": None}
        assert not list(folder.path.glob(".*"))
    # The steps of every session, however many there were.
    seconds = folder.metrics.tokens.diff().fillna(256) / folder.metrics[TIMED]
    assert folder.summary["seconds"] == pytest.approx(seconds.sum())


def test_a_tracker_that_is_missing_is_named(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ValueError, match=rf"pip install 'softmax-rnn\[{name}\]'"):
            train(tiny(texts, **{name: True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_of_one_run_write_whole_checkpoints(texts: Path, tmp_path: Path) -> None:
    config = tiny(texts, steps=4)
    config.save(tmp_path / "config.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "softmax_rnn", "train", "--config", str(tmp_path / "config.yaml")]
    command += ["--out", str(tmp_path / "two")]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "PAD" not in told.stderr  # transformers aligns what no run uses, and says so
    assert told.stdout.count("test loss") == 1
    one, two = train(config, tmp_path / "one"), RunFolder(tmp_path / "two")
    np.testing.assert_allclose(two.metrics.loss, one.metrics.loss, rtol=1e-4)
    np.testing.assert_allclose(two.test_losses, one.test_losses, rtol=1e-4)
    assert (two.checkpoints[-1] / "model.safetensors").exists()
    assert len(list((two.checkpoints[-1] / "state").iterdir())) == 2  # each wrote its half


def test_checkpoints_draw_no_bars_over_the_runs_own(
    texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tiny(texts, steps=4), tmp_path / "run")
    assert "model shards" not in capfd.readouterr().err


def test_a_bar_in_a_file_is_lines(
    texts: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line a minute; here each time that something is done."""
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    train(tiny(texts, steps=40, log_every=1), tmp_path / "run")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("run: ")]
    what = r"(loss \d\.\d{3}|test \d\.\d{3}|evaluating)"
    line = re.compile(rf"run: \d+%, step \d+ of 40 {what}(, \d+ min \d+ s left)?")
    assert len(lines) > 40
    assert all(map(line.fullmatch, lines))
    assert lines[-1].startswith("run: 100%, step 40 of 40 test ")
    assert "100%" not in lines[39]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_trackers_get_the_rows(
    tracker: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[dict[str, Any]] = []
    original = Accelerator.log

    def log(self: Any, values: dict[str, Any], step: int) -> None:
        logged.append({"step": step, **values})
        original(self, values, step)

    monkeypatch.setattr(Accelerator, "log", log)
    folder = train(tiny(texts, steps=4, **{tracker: True}), tmp_path / "run")
    pattern = {"tensorboard": "events.out.tfevents*", "wandb": "*.wandb"}[tracker]
    assert list(folder.path.rglob(pattern))
    losses = [row["loss"] for row in logged if "loss" in row]
    assert losses == list(folder.metrics.loss)
    assert [row["test_loss"] for row in logged if "test_loss" in row]


def test_the_commit_of_another_repository_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    (tmp_path / "environment.py").write_text("")
    monkeypatch.setattr(environment_module, "__file__", str(tmp_path / "environment.py"))
    assert environment_module._commit() is None
    subprocess.run([*git, "add", "environment.py"], check=True)
    assert environment_module._commit()


def test_a_vocabulary_too_small_is_named(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 257 ids, more than vocab_size=200"):
        train(tiny(texts, vocab_size=200), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_larger_vocabulary_is_kept(texts: Path, tmp_path: Path) -> None:
    folder = train(tiny(texts, vocab_size=300, steps=4), tmp_path / "run")
    config = json.loads((folder.checkpoints[-1] / "config.json").read_text())
    assert config["vocab_size"] == 300


def test_a_run_of_an_earlier_version_is_finished(texts: Path, tmp_path: Path) -> None:
    """It was killed after its last checkpoint; its evaluations have no accuracy."""
    folder = train(tiny(texts), tmp_path / "run")
    before = folder.summary
    for name in ("summary.json", "test_losses.npy", "test_errors.npy"):
        (folder.path / name).unlink()
    last = folder.checkpoints[-1]
    rows = [json.loads(line) for line in folder.evaluations_file.read_text().splitlines()]
    lines = [json.dumps({k: v for k, v in row.items() if k != "test_accuracy"}) for row in rows]
    (last / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
    (last / "manifest.json").unlink()
    seal(last)
    again = train(tiny(texts), folder.path, resume=True)
    assert again.evaluations.test_accuracy.isna().all()
    assert again.summary["test_accuracy"] == before["test_accuracy"]
