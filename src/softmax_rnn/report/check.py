"""Check the files of a finished run before a report reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from typing_extensions import TypedDict

from softmax_rnn._utils.validation import Count, NonNegative, PositiveInt, Share, validated
from softmax_rnn.data.tasks import is_task
from softmax_rnn.training.folder import RunFolder


class _Summary(TypedDict):
    parameters: PositiveInt
    train_loss: NonNegative
    test_loss: NonNegative
    tokens_per_second: NonNegative
    peak_memory_bytes: Count
    skipped_steps: Count
    loss_spikes: Count


class _TaskSummary(_Summary):
    steps: PositiveInt
    test_accuracy: Share


def check_run(run: RunFolder) -> None:
    """Check every file that reports and verdicts read.

    Raises:
        ValueError: if a file is damaged; the message names the file and the error.
        OSError: if a file is missing; the message names it.
    """
    _ = run.config, run.corpus  # reading them checks them
    asked = is_task(run.config.corpus)
    validated(_TaskSummary if asked else _Summary, run.summary, run.summary_file)
    _check_rows(run.metrics_file, run.metrics)
    if run.metrics.loss.isna().all():
        raise ValueError(f"{run.metrics_file} contains no loss.")
    _check_rows(run.evaluations_file, run.evaluations)
    if asked and run.evaluations.test_accuracy.isna().any():
        raise ValueError(f"{run.evaluations_file} has a row without test_accuracy.")
    _check_blocks(run, "test_losses", NonNegative)
    if asked or (run.path / "test_errors.npy").exists():  # earlier versions did not write it
        _check_blocks(run, "test_errors", Share)
        if len(run.test_errors) != len(run.test_losses):
            raise ValueError(
                f"{run.path / 'test_errors.npy'} has {len(run.test_errors)} test blocks, "
                f"test_losses.npy {len(run.test_losses)}."
            )


def _check_blocks(run: RunFolder, name: str, kind: Any) -> None:
    """Check one array of numbers of test blocks."""
    path = run.path / f"{name}.npy"
    try:
        values = getattr(run, name)
    except OSError:
        raise  # its message names the file
    except Exception as error:  # numpy raises many types of errors
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if values.dtype != np.float64 or values.ndim != 1 or not len(values):
        found = f"{values.dtype}{list(values.shape)}"
        raise ValueError(f"{path} must be float64, one number per test block, not {found}.")
    validated(list[kind], values.tolist(), path)


def _check_rows(path: Path, table: pd.DataFrame) -> None:
    if table.empty:
        raise ValueError(f"{path} contains no row.")
    tokens = table.tokens.to_numpy()
    falls = np.flatnonzero(np.diff(tokens) <= 0)
    if len(falls):
        row = falls[0] + 1
        allowed = f"must be more than {tokens[row - 1]}, not {tokens[row]}"
        raise ValueError(f"{path}: line {row + 1}: tokens {allowed}.")
