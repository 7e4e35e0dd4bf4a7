"""Rows of metrics.jsonl and evaluations.jsonl, and leaps of the loss in events.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from softmax_rnn._utils.progress import notice
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder, append_row, read_rows
from softmax_rnn.training.spikes import SEEN, spike_starts


class MetricRows:
    """Writes the rows of a run, in its first process.

    Args:
        config: of the run.
        folder: of the run.
        tokens: the number of tokens in training rows from one position to another.

    Attributes:
        seconds: time of the steps since the last row.
        steps: their number.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, tokens: Callable[[int, int], int]
    ) -> None:
        self.config, self.folder, self._tokens_between = config, folder, tokens
        self.seconds, self.steps = 0.0, 0
        self._position = self._tokens = 0  # rows and tokens, up to the last step counted
        rows = read_rows(folder.metrics_file)
        self._losses = [row["loss"] for row in rows if row["loss"] is not None][-SEEN:]

    def tokens(self, step: int) -> int:
        """Tokens of the first ``step`` steps, padding not counted."""
        position = step * self.config.batch_size
        self._tokens += self._tokens_between(self._position, position)
        self._position = position
        return self._tokens

    def add(self, step: int, loss: float, learning_rate: float, grad_norm: float) -> None:
        """Write the row of the steps since the last one; a loss of NaN says that none updated."""
        size = self.config.batch_size
        new = self._tokens_between((step - self.steps) * size, step * size)
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

    def add_evaluation(self, step: int, test_loss: float) -> None:
        """Write the row of an evaluation, unless it is there: of a session that was killed."""
        rows = read_rows(self.folder.evaluations_file)
        if not rows or rows[-1]["step"] < step:
            row = {"step": step, "tokens": self.tokens(step), "test_loss": test_loss}
            append_row(self.folder.evaluations_file, row)

    def _look_for_a_spike(self, step: int, loss: float) -> None:
        self._losses = [*self._losses, loss][-SEEN:]
        if not spike_starts(pd.Series(self._losses)).iloc[-1]:
            return
        usual = float(pd.Series(self._losses[:-1]).median())
        event = {"step": step, "event": "loss_spike", "loss": loss, "usual": usual}
        append_row(self.folder.events_file, event)
        notice(f"Step {step}: the training loss rose to {loss:.3f} from about {usual:.3f}.")


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
