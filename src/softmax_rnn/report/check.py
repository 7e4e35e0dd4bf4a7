"""Check the files of a finished run before a report reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from typing_extensions import TypedDict

from softmax_rnn._utils.validation import Count, NonNegative, PositiveInt, validated
from softmax_rnn.training.folder import RunFolder


class _Summary(TypedDict):
    parameters: PositiveInt
    train_loss: NonNegative
    test_loss: NonNegative
    tokens_per_second: NonNegative
    peak_memory_bytes: Count
    skipped_steps: Count
    loss_spikes: Count


def check_run(run: RunFolder) -> None:
    """Check every file that reports and verdicts read.

    Raises:
        ValueError: if a file is damaged; the message names the file and the error.
        OSError: if a file is missing; the message names it.
    """
    _ = run.config, run.corpus  # reading them checks them
    validated(_Summary, run.summary, run.summary_file)
    _check_rows(run.metrics_file, run.metrics)
    if run.metrics.loss.isna().all():
        raise ValueError(f"{run.metrics_file} contains no loss.")
    _check_rows(run.evaluations_file, run.evaluations)
    path = run.path / "test_losses.npy"
    try:
        losses = run.test_losses
    except OSError:
        raise  # its message names the file
    except Exception as error:  # numpy raises many types of errors
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if losses.dtype != np.float64 or losses.ndim != 1 or not len(losses):
        found = f"{losses.dtype}{list(losses.shape)}"
        raise ValueError(f"{path} must be float64, one number per test block, not {found}.")
    validated(list[NonNegative], losses.tolist(), path)


def _check_rows(path: Path, table: pd.DataFrame) -> None:
    if table.empty:
        raise ValueError(f"{path} contains no row.")
    tokens = table.tokens.to_numpy()
    falls = np.flatnonzero(np.diff(tokens) <= 0)
    if len(falls):
        row = falls[0] + 1
        allowed = f"must be more than {tokens[row - 1]}, not {tokens[row]}"
        raise ValueError(f"{path}: line {row + 1}: tokens {allowed}.")
