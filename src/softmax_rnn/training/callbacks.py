"""What happens beside the steps of a run: rows, events, the progress bar, stopping."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pandas as pd
from tqdm.auto import tqdm
from transformers import TrainerCallback

from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder, append_row, read_rows
from softmax_rnn.training.spikes import SEEN, spike_starts

# Seconds from one state of the bar to the next, at least and at most; in two days a file grows.
_PACE, _PACE_IN_A_FILE = (0.1, 10.0), (60.0, 60.0)


def notice(message: str) -> None:
    """Tell something on a line of its own, above the progress bar."""
    tqdm.write(message, file=sys.stderr)


class Checkpoints(TrainerCallback):
    """Checkpoints: as often as configured, and a last one when a stop is requested."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save as often as this session is to; the state is its checkpoint's."""
        state.save_steps = args.save_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and end, if asked to."""
        if self.asked():
            control.should_save = control.should_training_stop = True


class MetricRows(TrainerCallback):
    """Writes metrics.jsonl and evaluations.jsonl, and leaps of the loss to events.jsonl."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, tokens: Callable[[int, int], int]
    ) -> None:
        self.config, self.folder, self.tokens_of = config, folder, tokens
        self.started, self.seconds, self.steps = 0.0, 0.0, 0
        self.position, self.tokens = 0, 0  # rows and tokens, up to the last step counted
        self.losses: list[float] = []  # of the latest rows

    def count(self, step: int) -> int:
        """The tokens of all steps so far, padding not counted."""
        position = step * self.config.batch_size
        self.tokens += self.tokens_of(self.position, position)
        self.position = position
        return self.tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The rows of the sessions before."""
        rows = read_rows(self.folder.metrics_file)
        self.losses = [row["loss"] for row in rows if row["loss"] is not None][-SEEN:]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock, and have the last step logged."""
        self.seconds += time.perf_counter() - self.started
        self.steps += 1
        if state.global_step >= state.max_steps:
            control.should_log = True  # a last row also where log_every does not divide steps

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write a row."""
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            size, step = self.config.batch_size, state.global_step
            new = self.tokens_of((step - self.steps) * size, step * size)
            row = {
                "step": step,
                "tokens": self.count(step),
                "loss": _or_none(logs["loss"]),  # none where no step made an update
                "learning_rate": logs["learning_rate"],
                "grad_norm": _or_none(logs["grad_norm"]),
                "tokens_per_second": new / self.seconds,
            }
            append_row(self.folder.metrics_file, row)
            if row["loss"] is not None:
                self._look_for_a_spike(state.global_step, row["loss"])
            self.seconds, self.steps = 0.0, 0
        elif "eval_test_loss" in logs:
            rows = read_rows(self.folder.evaluations_file)
            if not rows or rows[-1]["step"] < state.global_step:  # else evaluated before a kill
                row = {
                    "step": state.global_step,
                    "tokens": self.count(state.global_step),
                    "test_loss": logs["eval_test_loss"],
                }
                append_row(self.folder.evaluations_file, row)

    def _look_for_a_spike(self, step: int, loss: float) -> None:
        self.losses = [*self.losses, loss][-SEEN:]
        if not spike_starts(pd.Series(self.losses)).iloc[-1]:
            return
        usual = float(pd.Series(self.losses[:-1]).median())
        event = {"step": step, "event": "loss_spike", "loss": loss, "usual": usual}
        append_row(self.folder.events_file, event)
        notice(f"Step {step}: the training loss leapt to {loss:.3f} from about {usual:.3f}.")


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


class ProgressBar(TrainerCallback):
    """A progress bar with the time left and the latest losses."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.bar: tqdm[Any] | None = None
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the bar."""
        if state.is_world_process_zero:
            least, most = _PACE if sys.stderr.isatty() else _PACE_IN_A_FILE
            self.bar = tqdm(
                total=self.config.steps,
                initial=state.global_step,
                unit="step",
                dynamic_ncols=True,
                mininterval=least,
                maxinterval=most,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move it."""
        if self.bar:
            self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Show the losses."""
        for key, label in (("loss", "loss"), ("eval_test_loss", "test")):
            if self.bar and math.isfinite(logs.get(key, math.nan)):
                self.shown[label] = f"{logs[key]:.3f}"
                self.bar.set_postfix(self.shown, refresh=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar:
            self.bar.close()
