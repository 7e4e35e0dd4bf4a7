"""Whether the files of a finished run can be reported on, looked at before anything is drawn."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd

from softmax_rnn._utils.rules import POSITIVE, require, whole, wrong
from softmax_rnn.training.folder import RunFolder

_SUMMARY = {
    "parameters": whole(1),
    "train_loss": POSITIVE,
    "test_loss": POSITIVE,
    "tokens_per_second": POSITIVE,
    "peak_memory_bytes": whole(),
    "skipped_steps": whole(),
    "loss_spikes": whole(),
}


def check_run(run: RunFolder) -> None:
    """Look at every file that reports and verdicts read.

    Raises:
        ValueError: naming the file that is damaged, and what is wrong with it.
        OSError: naming the file that is not there.
    """
    _ = run.config, run.corpus  # they look at their own files
    require(run.summary_file, run.summary, _SUMMARY)
    _check_rows(run.metrics_file, run.metrics)
    if run.metrics.loss.isna().all():
        raise ValueError(f"{run.metrics_file} holds no loss.")
    _check_rows(run.evaluations_file, run.evaluations)
    path = run.path / "test_losses.npy"
    try:
        losses = run.test_losses
    except OSError:
        raise  # names the file itself
    except Exception as error:  # numpy's reader raises what it meets
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if losses.dtype != np.float64 or losses.ndim != 1 or not len(losses):
        found = f"{losses.dtype}{list(losses.shape)}"
        raise wrong(path, "the array", "float64, one number a test block", found)
    if not ((losses >= 0) & (losses < 1e100)).all():
        raise wrong(path, "every loss", POSITIVE.words, losses)


def _check_rows(path: Path, table: pd.DataFrame) -> None:
    if table.empty:
        raise ValueError(f"{path} holds no row.")
    for number, (before, now) in enumerate(itertools.pairwise(table.tokens), start=2):
        if now <= before:
            raise wrong(path, f"line {number}: tokens", f"more than {before}", now)
