"""Runs on a synthetic task."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from softmax_rnn.cli.main import main
from softmax_rnn.data import TaskRows, parse_task
from softmax_rnn.training import RunConfig, train
from softmax_rnn.training.folder import RunFolder
from tiny import assert_same_run

# Two tokens among noise, asked for at the end: learned in a few steps.
TASK = "task:selective_copy?tokens=2&vocab=4"
EASY: dict[str, Any] = {
    **{"corpus": TASK, "block_size": 8, "batch_size": 32, "learning_rate": 5e-3},
    **{"hidden_size": 32, "intermediate_size": 0, "num_layers": 1, "num_heads": 2},
    **{"steps": 240, "log_every": 10, "evaluate_every": 10, "save_every": 20},
    "stop_at_accuracy": 0.7,
}


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(RunConfig(**EASY), tmp_path_factory.mktemp("solved") / "run")


def test_a_run_ends_at_its_accuracy(solved: RunFolder) -> None:
    accuracies = solved.evaluations.test_accuracy
    assert (accuracies[:-1] < 0.7).all()
    assert accuracies.iloc[-1] >= 0.7
    last = int(solved.evaluations.step.iloc[-1])
    assert 10 < last < 240
    assert solved.summary["steps"] == last == solved.metrics.step.iloc[-1]
    assert solved.checkpoints[-1].name == f"checkpoint-{last}"
    assert solved.summary["tokens"] == last * 32 * 8


def test_accuracy_is_the_share_of_right_answers(solved: RunFolder) -> None:
    model = AutoModelForCausalLM.from_pretrained(solved.checkpoints[-1]).eval()
    rows = TaskRows(parse_task(TASK, 8), "test", solved.config.split_seed)
    ids, labels = map(torch.from_numpy, rows.arrays(rows.seed, np.arange(len(rows))))
    with torch.no_grad():
        answers = model(ids).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != -100
    assert asked.sum(1).tolist() == [2] * len(rows)
    right = (answers == labels[:, 1:])[asked].double().reshape(-1, 2)
    assert solved.summary["test_accuracy"] == pytest.approx(float(right.mean()))
    np.testing.assert_allclose(solved.test_errors, 1 - right.mean(1).numpy())
    assert 0 < solved.test_errors.mean() <= 0.3
    tokenizer = AutoTokenizer.from_pretrained(solved.checkpoints[-1])
    assert tokenizer("1 0 1")["input_ids"] == [1, 0, 1]


@pytest.mark.parametrize("killed", ["before the last checkpoint", "after it"])
def test_a_run_that_ends_early_resumes(solved: RunFolder, tmp_path: Path, killed: str) -> None:
    """Killed between its last evaluation and its end, it ends at the same step."""
    there = tmp_path / "run"
    shutil.copytree(solved.path, there)
    for name in ("summary.json", "test_losses.npy", "test_errors.npy"):
        (there / name).unlink()
    if killed == "before the last checkpoint":
        shutil.rmtree(RunFolder(there).checkpoints[-1])
    assert_same_run(train(RunConfig(**EASY), there, resume=True), solved)
    assert RunFolder(there).summary["steps"] == solved.summary["steps"]


def test_a_run_may_not_reach_its_accuracy(tmp_path: Path) -> None:
    fields = {**EASY, "steps": 20, "evaluate_every": 10, "corpus": "task:parity"}
    folder = train(RunConfig(**fields), tmp_path / "run")
    assert folder.summary["steps"] == 20


def test_what_is_wrong_with_a_task_is_told(tmp_path: Path, capsys: Any) -> None:
    words = ["train", "--out", str(tmp_path / "run"), "--corpus"]
    assert main([*words, "task:mquar"]) == 2
    assert "Did you mean 'mqar'?" in capsys.readouterr().err
    assert main([*words, "task:mqar?pairs=9", "--block_size", "16"]) == 2
    assert "--block-size must be at least 36, not 16" in capsys.readouterr().err
    assert main([*words, "task:parity", "--vocab_size", "1"]) == 2
    assert "task:parity has 2 ids, more than --vocab-size 1 rows" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["prepare", "task:parity"]) == 2
    assert "nothing is prepared" in capsys.readouterr().err


def test_train_prints_the_accuracy(tmp_path: Path, capsys: Any) -> None:
    fields = {"corpus": "task:parity", "block_size": 8, "hidden_size": 16, "num_layers": 1}
    fields |= {"num_heads": 2, "steps": 1, "log_every": 1, "evaluate_every": 1, "save_every": 1}
    options = [word for key, value in fields.items() for word in (f"--{key}", str(value))]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0
    accuracy = RunFolder(tmp_path / "run").summary["test_accuracy"]
    assert f", test accuracy {accuracy:.4f}\n" in capsys.readouterr().out
