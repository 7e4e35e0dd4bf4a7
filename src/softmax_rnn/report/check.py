"""Whether the files of a finished run can be reported on, looked at before anything is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from softmax_rnn.data.manifest import SPLITS
from softmax_rnn.rules import MAPPING, POSITIVE, TEXT, Rule, require, whole, wrong
from softmax_rnn.training.folder import RunFolder, read_rows

_SUMMARY = {
    "parameters": whole(1),
    "train_loss": POSITIVE,
    "test_loss": POSITIVE,
    "tokens_per_second": POSITIVE,
    "peak_memory_bytes": whole(),
}
_METRICS = {"step": whole(1), "tokens": whole(1), "loss": POSITIVE}
_EVALUATIONS = {"step": whole(), "tokens": whole(), "test_loss": POSITIVE}
_COUNTS = {"tokens": whole(), "sha256": TEXT}


def check_run(run: RunFolder) -> None:
    """Look at every file that reports and verdicts read.

    Raises:
        ValueError: naming the file that is damaged, and what is wrong with it.
        OSError: naming the file that is not there.
    """
    assert run.config is not None  # says itself which file and key
    summary = run.path / "summary.json"
    require(summary, _read(summary, lambda: run.summary), _SUMMARY)
    path = run.environment_file
    environment = _read(path, lambda: run.environment)
    require(path, environment, {"corpus": MAPPING})
    for split in SPLITS:
        require(path, environment["corpus"].get(split), _COUNTS, f"corpus.{split}.")
    _check_rows(run.metrics_file, _METRICS)
    _check_rows(run.evaluations_file, _EVALUATIONS)
    path = run.path / "test_losses.npy"
    losses = _read(path, lambda: run.test_losses)
    if losses.dtype != np.float64 or losses.ndim != 1 or not len(losses):
        found = f"{losses.dtype}{list(losses.shape)}"
        raise wrong(path, "the array", "float64, one number a test block", found)
    if not ((losses >= 0) & (losses < 1e100)).all():
        raise wrong(path, "every loss", POSITIVE.words, losses)


def _read(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError:
        raise  # names the file itself
    except Exception as error:  # every parser has errors of its own
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _check_rows(path: Path, rules: dict[str, Rule]) -> None:
    rows = _read(path, lambda: read_rows(path))
    if not rows:
        raise ValueError(f"{path} holds no row.")
    before = -1
    for number, row in enumerate(rows, start=1):
        require(path, row, rules, f"line {number}: ")
        if row["tokens"] <= before:
            raise wrong(path, f"line {number}: tokens", f"more than {before}", row["tokens"])
        before = row["tokens"]
