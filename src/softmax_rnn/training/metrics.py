"""Rows of metrics.jsonl and evaluations.jsonl, and loss spikes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from softmax_rnn._utils.progress import notice
from softmax_rnn.training.config import TrainingConfig
from softmax_rnn.training.folder import RunFolder, append_row, read_rows

_WINDOW = 15  # rows of the recent past
_MIN_RISE = 0.2  # nats
_NEEDED_ROWS = _WINDOW + 2  # to decide whether the last row starts a spike


@dataclass
class MetricRows:
    """Writes the rows of a run, in its first process."""

    config: TrainingConfig
    folder: RunFolder
    tokens_between: Callable[[int, int], int]  # in training rows between two positions
    seconds: float = 0.0  # time of the steps since the last row
    steps: int = 0  # their number

    def __post_init__(self) -> None:
        self._position = self._tokens = 0  # rows and tokens, up to the last step counted
        rows = read_rows(self.folder.metrics_file)
        self._losses = [row["loss"] for row in rows if row["loss"] is not None][-_NEEDED_ROWS:]

    def tokens(self, step: int) -> int:
        """Tokens of the first ``step`` steps, padding not counted."""
        position = step * self.config.batch_size
        self._tokens += self.tokens_between(self._position, position)
        self._position = position
        return self._tokens

    def add(self, step: int, loss: float, learning_rate: float, grad_norm: float) -> None:
        """Write the row of the steps since the last one; the loss is NaN if none made an update."""
        size = self.config.batch_size
        new = self.tokens_between((step - self.steps) * size, step * size)
        row = {
            "step": step,
            "tokens": self.tokens(step),
            "loss": _or_none(loss),
            "learning_rate": learning_rate,
            "grad_norm": _or_none(grad_norm),
            "tokens_per_second": new / self.seconds,
        }
        append_row(self.folder.metrics_file, row)
        self.seconds, self.steps = 0.0, 0
        if row["loss"] is not None:
            self._look_for_a_spike(step, loss)

    def add_evaluation(self, step: int, test_loss: float, test_accuracy: float) -> None:
        """Write the row of an evaluation, unless an earlier, killed session has written it."""
        rows = read_rows(self.folder.evaluations_file)
        if not rows or rows[-1]["step"] < step:
            found = {"test_loss": test_loss, "test_accuracy": test_accuracy}
            row = {"step": step, "tokens": self.tokens(step), **found}
            append_row(self.folder.evaluations_file, row)

    def _look_for_a_spike(self, step: int, loss: float) -> None:
        self._losses = [*self._losses, loss][-_NEEDED_ROWS:]
        if not spike_starts(pd.Series(self._losses)).iloc[-1]:
            return
        usual = float(pd.Series(self._losses[:-1]).median())
        event = {"step": step, "event": "loss_spike", "loss": loss, "usual": usual}
        append_row(self.folder.events_file, event)
        notice(f"Step {step}: the training loss rose to {loss:.3f} from about {usual:.3f}.")


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def spike_starts(losses: pd.Series[float]) -> pd.Series[bool]:
    """The rows in which the training loss jumps above its recent values.

    A row starts a spike if it exceeds the median of the 15 rows before it by five of their median
    absolute deviations (scaled to standard deviations) and by 0.2 nats, and the row before it does
    not.
    """
    before = losses.shift(1).rolling(_WINDOW)
    median = before.median()
    spread = 1.4826 * before.apply(lambda rows: np.median(np.abs(rows - np.median(rows))), raw=True)
    above = losses - median > np.maximum(5 * spread, _MIN_RISE)
    return above & ~above.shift(1, fill_value=False)


def loss_spikes(losses: pd.Series[float]) -> int:
    """The number of spikes (see :func:`spike_starts`). Rows without a loss are left out."""
    return int(spike_starts(losses.dropna()).sum())
