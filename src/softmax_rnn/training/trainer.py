"""Transformers' Trainer, with what a fair and safe comparison needs."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from softmax_rnn.data import Rows
from softmax_rnn.models import SoftmaxRNNForCausalLM
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder, append_row, read_rows


class NonFiniteError(ArithmeticError):
    """The loss or its gradient is not finite; nothing after the step before was kept."""


class SpecTrainer(Trainer):
    """One run of one spec.

    Differs from its base in five things: blocks come in the order of the dataset; the schedule has
    a horizon of its own and no step with rate 0; a non-finite loss or gradient stops the run
    before the update; checkpoints are written aside and renamed; the test loss is the mean over
    all predicted tokens, and known block by block.
    """

    def __init__(
        self,
        model: SoftmaxRNNForCausalLM,
        config: RunConfig,
        folder: RunFolder,
        train_blocks: Rows,
        test_blocks: Rows,
        **kwargs: Any,
    ) -> None:
        self.config, self.folder = config, folder
        self._saving_to: Path | None = None
        self.test_losses: NDArray[np.float64] | None = None
        self.tested_at = -1
        self._bar = _Bar(config)
        arguments = _arguments(config, folder)
        seen = train_blocks.sampled(config.seed, config.steps * config.batch_size)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=seen,
            eval_dataset=test_blocks,
            compute_metrics=self._test_metrics,
            callbacks=[_Rows(config, folder, seen.tokens), self._bar],
            **kwargs,
        )
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; however it ends, what is printed next has a line of its own."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._bar.close()

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The linear warm-up and decay of the configuration."""
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, self.config.learning_rate_factor
        )
        return self.lr_scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward; stops on a loss that is not finite."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if not loss.isfinite():
            self._stop("loss", loss.item())
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        norm = float(super()._get_grad_norm(model, grad_norm=grad_norm))
        if not math.isfinite(norm):
            self._stop("gradient norm", norm)
        return norm

    def _stop(self, what: str, value: float) -> None:
        kept = self.folder.checkpoints
        raise NonFiniteError(
            f"The {what} of step {self.state.global_step + 1} is {value}; the run stopped before "
            f"the update. Last checkpoint: {kept[-1] if kept else 'none'}. "
            "Try a smaller --learning_rate or a --gradient_clip."
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's loss, every block's loss, and every block's number of predicted tokens."""
        given = dict(self._prepare_inputs(inputs))
        labels = given.pop("labels")[:, 1:]
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**given, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # 0 at -100
        counts = (labels != -100).sum(1)
        totals = losses.double().sum(1)
        return totals.sum() / counts.sum().clamp(min=1), totals / counts.clamp(min=1), counts

    def _test_metrics(self, prediction: Any) -> dict[str, float]:
        self.test_losses = np.asarray(prediction.predictions, dtype=np.float64)
        self.tested_at = self.state.global_step
        loss = float(np.average(self.test_losses, weights=prediction.label_ids))
        if not math.isfinite(loss):
            raise NonFiniteError(f"The test loss after step {self.tested_at} is {loss}.")
        return {"test_loss": loss}

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving_to or self.folder.path)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        aside = self._saving_to = self.folder.path / f".{name}.parts"  # of all processes
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                (aside / name).rename(self.folder.path / name)
        finally:
            self._saving_to = None
            if self.is_world_process_zero():
                shutil.rmtree(aside, ignore_errors=True)
        if self.is_world_process_zero():
            for old in self.folder.checkpoints[: -self.config.keep_checkpoints]:
                shutil.rmtree(old)


def _arguments(config: RunConfig, folder: RunFolder) -> TrainingArguments:
    gpu = torch.cuda.is_available()
    bf16 = config.precision == "bf16" or (config.precision == "auto" and gpu)
    arguments = TrainingArguments(
        output_dir=str(folder.path),
        max_steps=config.steps,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_epsilon=config.epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        bf16=bf16,
        use_cpu=not gpu,
        torch_compile=config.compile,
        seed=config.seed,
        logging_strategy="steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=config.evaluate_every,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=None,  # ours: the base class deletes before the new one is complete
        report_to=["tensorboard"] if config.tensorboard else [],
        dataloader_pin_memory=gpu,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    # Several GPUs outside torchrun: one is used. DataParallel would multiply the batch.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    share, rest = divmod(config.batch_size, config.accumulation * arguments.world_size)
    if rest or not share:
        raise ValueError(
            f"batch_size={config.batch_size} must be a multiple of accumulation="
            f"{config.accumulation} times the {arguments.world_size} processes."
        )
    arguments.per_device_train_batch_size = share
    arguments.per_device_eval_batch_size = 2 * share  # no gradients to hold
    return arguments


class _Rows(TrainerCallback):
    """Writes metrics.jsonl and evaluations.jsonl."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, tokens: Callable[[int, int], int]
    ) -> None:
        self.config, self.folder, self.tokens_of = config, folder, tokens
        self.started, self.seconds, self.steps = 0.0, 0.0, 0
        self.position, self.tokens = 0, 0  # rows and tokens, up to the last step logged

    def count(self, step: int) -> int:
        """The tokens of the steps since this was last asked, padding not counted."""
        position = step * self.config.batch_size
        new = self.tokens_of(self.position, position)
        self.position, self.tokens = position, self.tokens + new
        return new

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += time.perf_counter() - self.started
        self.steps += 1
        if state.global_step >= state.max_steps:
            control.should_log = True  # a last row also where log_every does not divide steps

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            self.count(state.global_step - self.steps)  # of sessions before this one
        new = self.count(state.global_step)
        place = {"step": state.global_step, "tokens": self.tokens}
        if "loss" in logs:
            row = {
                **place,
                "loss": logs["loss"],
                "learning_rate": logs["learning_rate"],
                "grad_norm": logs["grad_norm"],
                "tokens_per_second": new / self.seconds,
            }
            append_row(self.folder.metrics_file, row)
            self.seconds, self.steps = 0.0, 0
        elif "eval_test_loss" in logs:
            rows = read_rows(self.folder.evaluations_file)
            if not rows or rows[-1]["step"] < state.global_step:  # else evaluated before a kill
                row = {**place, "test_loss": logs["eval_test_loss"]}
                append_row(self.folder.evaluations_file, row)


class _Bar(TrainerCallback):
    """A progress bar with the time left and the latest losses."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.bar: tqdm[Any] | None = None
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=self.config.steps, initial=state.global_step, unit="step", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar:
            self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        for key, label in (("loss", "loss"), ("eval_test_loss", "test")):
            if key in logs and self.bar:
                self.shown[label] = f"{logs[key]:.3f}"
                self.bar.set_postfix(self.shown)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar:
            self.bar.close()
