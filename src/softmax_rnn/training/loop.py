"""The training loop: gradients, update, metrics, evaluation, checkpoint, stop."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softmax_rnn._utils.files import write_json
from softmax_rnn._utils.integrity import seal
from softmax_rnn._utils.progress import notice
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.conversion.lora import merged_weights
from softmax_rnn.conversion.objectives import Distillation
from softmax_rnn.data import CorpusError, PreparedCorpus, Rows, TaskCorpus
from softmax_rnn.models.modeling import checkpoint_activations
from softmax_rnn.training.checkpoint import (
    PROGRESS,
    CheckpointError,
    read_progress,
    read_state,
    whole_weights,
    write_state,
)
from softmax_rnn.training.config import ConversionConfig, TrainingConfig
from softmax_rnn.training.context_parallel import ContextParallel
from softmax_rnn.training.distributed import gather, of_other_processes, shard, together
from softmax_rnn.training.folder import RunFolder, append_row, read_rows, step_of
from softmax_rnn.training.losses import autocast, objective, token_losses
from softmax_rnn.training.metrics import MetricRows
from softmax_rnn.training.optimizer import adamw
from softmax_rnn.training.stopping import RunStopped, StopRequest, foremost
from softmax_rnn.training.work import RunBar

_NOT_DISK_ERRORS = (torch.OutOfMemoryError, ChildProcessError)


class NonFiniteError(ArithmeticError):
    """The loss or its gradient is not finite; the step made no update."""


@dataclass(eq=False, repr=False)
class Loop:
    """The steps of one run. All processes of the run execute them and decide together."""

    config: TrainingConfig
    folder: RunFolder
    corpus: PreparedCorpus | TaskCorpus
    train_rows: Rows
    test_rows: Rows
    model: PreTrainedModel  # with its initial weights
    tokenizer: PreTrainedTokenizerBase  # saved with the weights
    accelerator: Accelerator  # of this process
    stop: StopRequest  # checked after every step and test batch
    source: str | None = None  # the hash of the weights of a pretrained model
    step: int = field(default=0, init=False)  # the number of steps so far

    def __post_init__(self) -> None:
        config, accelerator, model = self.config, self.accelerator, self.model
        processes = accelerator.num_processes
        self.context = ContextParallel.of(model, config, accelerator)
        # The teams of processes that share rows, and the number of this one's.
        self.teams, self.team = self.context.teams, self.context.team
        self.share, rest = divmod(config.batch_size, config.accumulation * self.teams)
        if rest or not self.share:
            per_row = f" / context_parallel={self.context.size}" if self.context.size > 1 else ""
            raise ValueError(
                f"batch_size={config.batch_size} must be a multiple of accumulation="
                f"{config.accumulation} times the {processes} processes{per_row}."
            )
        model.to(accelerator.device)
        self.sharded = config.fsdp and processes > 1
        transferring = isinstance(config, ConversionConfig) and config.objective == "transfer"
        if config.gradient_checkpointing and not transferring:  # which keeps few activations
            checkpoint_activations(model, {"use_reentrant": False})
        if self.sharded:
            shard(model)
        self.converting = isinstance(config, ConversionConfig)
        # With compile=auto each step may be compiled or not; conversions only on request.
        self.compiles = config.compile is True
        if config.compile == "auto":
            self.compiles = not self.converting and self.context.size == 1
        if self.compiles:
            model.compile()
        # Computes the loss of a batch; gradients are averaged over the processes.
        self.objective = objective(model, config)
        self.forward: Any = self.objective
        if processes > 1 and not self.sharded:
            self.forward = accelerator.prepare_model(self.forward)
        self.optimizer = adamw(model, config)
        # Of each test row: its mean loss, and the share of its predictions that are wrong.
        self.test_losses: NDArray[np.float64] | None = None
        self.test_errors: NDArray[np.float64] | None = None
        self.test_accuracy: float | None = None
        self.last_step = config.steps  # fewer if the run ends at its wanted accuracy
        self._tested_at = self._saved_at = -1  # steps
        self._loss_sum, self._loss_steps = 0.0, 0  # of the updates since the last row
        self._skipped_in_a_row = 0
        self._overflow = ""  # the attention's error in this step

    def run(
        self,
        checkpoint: Path | None,
        within: Callable[[Loop], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Train to the end, from the start or a checkpoint; raises the errors of ``train``.

        The steps are taken inside the context that ``within`` makes of the loop.
        """
        try:
            if checkpoint is not None:
                self._resume(checkpoint)
            tokens_between = functools.partial(self.train_rows.drawn_tokens, self.config.seed)
            self.metrics = MetricRows(self.config, self.folder, tokens_between)
            label, work = self.folder.path.name, len(self.test_rows) * self._test_length()
            shown = self.accelerator.is_main_process
            with (
                within(self),
                RunBar(label, self.config, work, self.step, visible=shown) as self.bar,
            ):
                self._steps()
        except RuntimeError as error:
            if not of_other_processes(error):
                raise
            raise ChildProcessError(
                f"Another process of this run ended, or cannot be reached ({error}). Last "
                f"checkpoint: {self.folder.last_checkpoint}; --resume continues from it."
            ) from error

    def _steps(self) -> None:
        config, shown = self.config, ""
        evaluated = {row["step"]: row for row in read_rows(self.folder.evaluations_file)}
        for step, row in evaluated.items():
            self._end_if_accurate(step, row.get("test_accuracy"))
        if self._evaluation_is_due() and self.step not in evaluated:
            self.evaluate()  # the run was stopped before this evaluation
        self.model.train()
        while self.step < self.last_step:
            started = time.perf_counter()
            rate = config.learning_rate * config.learning_rate_factor(self.step)
            loss = self.gradients()
            norm = self.gradient_norm()
            stopped = self._agree(loss, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.metrics.seconds += time.perf_counter() - started
            self.metrics.steps += 1

            last = self.step == config.steps
            if self.step % config.log_every == 0 or last:
                shown = self._log(rate, norm)
            self.bar.trained(self.step, shown)
            if stopped:
                self._stop(stopped)
            if self._evaluation_is_due():
                self.evaluate()
                self.model.train()
            last = self.step == self.last_step
            if self.step % config.save_every == 0 or last:
                self.save()
        if self._tested_at != self.last_step:  # an earlier session evaluated, but was killed
            self.evaluate()

    def gradients(self) -> float:
        """Forward and backward passes of the next step.

        Returns this process's share of the batch's mean loss; NaN if the attention overflows.
        """
        config, processes = self.config, self.accelerator.num_processes
        if isinstance(self.objective, Distillation):
            self.objective.left = 1 - self.step / config.steps
        first = self.step * config.batch_size
        predicted = max(self.train_rows.predicted(config.seed, first, first + config.batch_size), 1)
        total = 0.0
        for part in range(config.accumulation):
            start = first + (part * self.teams + self.team) * self.share
            batch = self._batch(self.train_rows.drawn_rows(config.seed, start, start + self.share))
            last = part == config.accumulation - 1  # averages gradients over the processes
            if self.sharded:
                self.model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.forward):
                try:
                    with self._autocast():
                        loss = self.forward(predicted, **batch)
                    (loss * processes).backward()  # gradients are means over the processes
                except OverflowError as error:
                    if processes > 1:  # the other processes wait for its gradients
                        raise
                    self._overflow = f": {error}"
                    return math.nan
            total += float(loss.detach())
        return total

    def gradient_norm(self) -> float:
        """The norm of the gradient over all processes; clips it to the configured one."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _agree(self, loss: float, norm: float) -> int:
        """Add the loss of this step, or skip its update; return the stop request, 0 for none."""
        losses, norms, codes = zip(
            *gather(self.accelerator, loss, norm, self.stop.code), strict=True
        )
        loss = sum(losses)
        bad_norms = (each for each in norms if not math.isfinite(each))
        values = {"loss": loss, "gradient norm": next(bad_norms, norm)}
        overflow, self._overflow = self._overflow, ""
        if all(map(math.isfinite, values.values())):
            self._loss_sum += loss
            self._loss_steps += 1
            self._skipped_in_a_row = 0
        else:
            self._skip(values, overflow)
        return foremost(map(int, codes))

    def _skip(self, values: dict[str, float], overflow: str) -> None:
        """Make no update in this step, or end the run."""
        what, value = next(each for each in values.items() if not math.isfinite(each[1]))
        step = self.step + 1
        message = f"The {what} of step {step} is {value}{overflow}"
        if self._skipped_in_a_row >= self.config.skip_non_finite:
            raise NonFiniteError(
                f"{message}; the run stopped before the update, with {self._skipped_in_a_row} "
                f"steps skipped in a row. Last checkpoint: {self.folder.last_checkpoint}. To skip "
                "the step, resume with a larger skip_non_finite; a new run may need a smaller "
                "learning_rate or a gradient_clip."
            )
        self._skipped_in_a_row += 1
        self.optimizer.zero_grad()  # AdamW skips parameters without a gradient
        if self.accelerator.is_main_process:
            event = {"step": step, "event": "non_finite", "what": what, "value": str(value)}
            append_row(self.folder.events_file, event)
            notice(f"{message}; the update is skipped.")

    def _log(self, rate: float, norm: float) -> str:
        """Write a row of metrics; return its loss for the progress bar."""
        loss = self._loss_sum / self._loss_steps if self._loss_steps else math.nan
        self._loss_sum, self._loss_steps = 0.0, 0
        if self.accelerator.is_main_process:
            self.metrics.add(self.step, loss, rate, norm)
        self.accelerator.log({"loss": loss, "learning_rate": rate, "grad_norm": norm}, self.step)
        return f"loss {loss:.3f}"

    def evaluate(self) -> None:
        """The mean loss and accuracy over all predicted tokens of the test split.

        The mean loss of each of its rows is kept, too.
        """
        teams, team = self.teams, self.team
        count = len(self.test_rows)
        size = max(1, int(2 * self.share / self._test_length()))  # twice as many: no gradients
        size = min(size, -(-count // teams))
        sums = torch.zeros(3, count, dtype=torch.float64, device=self.accelerator.device)
        self.model.eval()
        for start in range(0, count, size * teams):
            if stopped := self.stop_request():
                self._stop(stopped)
            places = range(start + team * size, start + (team + 1) * size)
            # A sharded model needs every process for every batch, so the last row may be repeated.
            found = self.test_batch([min(place, count - 1) for place in places])
            mine = [place for place in places if place < count]
            sums[:, mine] = found[:, : len(mine)]
            self.bar.tested(self.step, min(1.0, (start + size * teams) / count))
        losses, right, counts = self.accelerator.reduce(sums, "sum").cpu().numpy()
        if not counts.any():
            raise CorpusError("The test split has no token to predict: each row is one token long.")
        self.test_losses, self._tested_at = losses / np.maximum(counts, 1), self.step
        self.test_errors = (counts - right) / np.maximum(counts, 1)
        loss = float(np.average(self.test_losses, weights=counts))
        self.test_accuracy = accuracy = float(right.sum() / counts.sum())
        if not math.isfinite(loss):
            raise NonFiniteError(f"The test loss after step {self.step} is {loss}.")
        if self.accelerator.is_main_process:
            self.metrics.add_evaluation(self.step, loss, accuracy)
        self.accelerator.log({"test_loss": loss, "test_accuracy": accuracy}, self.step)
        self._end_if_accurate(self.step, accuracy)
        self.bar.tested(self.step, 1.0, f"test {loss:.3f}")

    def _test_length(self) -> float:
        """The length of a test row over that of a block: a task's may be longer."""
        return len(self.test_rows[0]["input_ids"]) / self.config.block_size

    def test_batch(self, places: Sequence[int]) -> Tensor:
        """Of each of these test rows: its losses' sum, its right and its predicted tokens.

        If processes share rows: of this process's part of each row.
        """
        batch = self._batch([self.test_rows[place] for place in places])
        with self._autocast():
            found = token_losses(self.model, batch)
        return torch.stack([x.double().sum(1) for x in found])

    def save(self) -> None:
        """Write a checkpoint under a temporary name, with hashes, and rename it."""
        config, accelerator, name = self.config, self.accelerator, f"checkpoint-{self.step}"
        parts = self.folder.path / f".{name}.parts"  # shared by all processes
        written = parts / name
        may_end = self.config.stop_at_accuracy is not None and self._evaluation_is_due()
        apart = self.sharded or self.converting  # what is trained, in files of its own
        weights = not apart or may_end or self.step == self.last_step
        try:
            with together(accelerator):
                self.corpus.check_unchanged()  # else the model was trained on other text
                written.mkdir(parents=True, exist_ok=True)
            if self.sharded:
                self.model.reshard()  # an evaluation leaves what is outside the layers gathered
            state = None
            if weights and self.sharded:
                state = whole_weights(self.model)
            elif weights and isinstance(config, ConversionConfig) and config.adapted:
                state = merged_weights(self.model)
            with together(accelerator):
                if accelerator.is_main_process:
                    self.tokenizer.save_pretrained(written)
                    if weights:
                        self.model.save_pretrained(
                            written, state_dict=state, max_shard_size="100TB"
                        )
                    else:
                        self.model.config.save_pretrained(written)
            with together(accelerator):
                rank = accelerator.process_index
                trained = self.converting or not weights
                write_state(written, self.model, self.optimizer, rank, weights=trained)
            with together(accelerator):
                if accelerator.is_main_process:
                    progress = {
                        "loss_sum": self._loss_sum,
                        "loss_steps": self._loss_steps,
                        "skipped_in_a_row": self._skipped_in_a_row,
                    }
                    write_json(written / PROGRESS, progress)
                    self.folder.copy_rows(written)
                    seal(written)
                    self.folder.add_checkpoint(written, config.keep_checkpoints)
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, _NOT_DISK_ERRORS) or of_other_processes(error):
                raise
            free = shutil.disk_usage(self.folder.path).free
            raise CheckpointError(
                f"{name} could not be written: {error}. Its disk has {bytes_text(free)} left. "
                f"Last checkpoint: {self.folder.last_checkpoint}; when there is room, --resume "
                "continues from it."
            ) from error
        finally:
            if accelerator.is_main_process:
                shutil.rmtree(parts, ignore_errors=True)
        self._saved_at = self.step

    def _resume(self, checkpoint: Path) -> None:
        progress = read_progress(checkpoint)
        self._loss_sum, self._loss_steps = progress["loss_sum"], progress["loss_steps"]
        self._skipped_in_a_row = progress["skipped_in_a_row"]
        self.step = self._saved_at = step_of(checkpoint)
        read_state(checkpoint, self.model, self.optimizer, self.accelerator.process_index)

    def _evaluation_is_due(self) -> bool:
        return self.step > 0 and (
            self.step % self.config.evaluate_every == 0 or self.step == self.last_step
        )

    def _end_if_accurate(self, step: int, accuracy: float | None) -> None:
        """Make a step the run's last one if its accuracy is the one that the run is to reach."""
        wanted = self.config.stop_at_accuracy
        if wanted is not None and accuracy is not None and accuracy >= wanted:
            self.last_step = min(self.last_step, step)

    def stop_request(self) -> int:
        """The signal that requests a stop, in any process; 0 for none."""
        return foremost(int(code) for (code,) in gather(self.accelerator, self.stop.code))

    def _stop(self, code: int) -> None:
        if self._saved_at != self.step:
            self.save()
        code = foremost((code, self.stop.code))  # another signal may have arrived since
        raise RunStopped(code, f"after step {self.step}, saved in checkpoint-{self.step}")

    def _batch(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        device = self.accelerator.device
        return self.context.own({name: x.to(device) for name, x in default_collate(rows).items()})

    def _autocast(self) -> torch.autocast:
        return autocast(self.accelerator.device, self.config.precision)
