"""Transformers' Trainer, with what a fair and safe comparison needs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy._core.multiarray import _reconstruct
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from softmax_rnn._utils.files import write_json
from softmax_rnn.data import PreparedCorpus, Rows
from softmax_rnn.models import SoftmaxRNNForCausalLM
from softmax_rnn.training.callbacks import Checkpoints, MetricRows, ProgressBar, notice
from softmax_rnn.training.checkpoint import CheckpointError, seal
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder, append_row, read_rows, step_of
from softmax_rnn.training.sharding import ShardingTrainer
from softmax_rnn.training.stopping import RunStopped, StopRequest, foremost

# What an array of NumPy's generator is pickled with.
_NUMPY: list[Any] = [_reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]
_NOT_OF_THE_DISK = (torch.OutOfMemoryError, ChildProcessError)
_PROGRESS = "progress.json"  # in a checkpoint: what its base does not keep


class NonFiniteError(ArithmeticError):
    """The loss or its gradient is not finite; nothing after the step before was kept."""


class _EvaluationStopped(Exception):  # noqa: N818
    """A stop was requested during evaluation."""


class SpecTrainer(ShardingTrainer):
    """One run of one spec.

    Differs from its base in six things: blocks come in the order of the dataset; the schedule has
    a horizon of its own and no step with rate 0; a step whose loss or gradient is not finite makes
    no update; checkpoints are written aside, sealed and renamed, and go on within a row of metrics;
    stop requests are honoured after every step and test batch; the test loss is the mean over all
    predicted tokens, and known block by block. All processes of a run decide together.
    """

    def __init__(
        self,
        model: SoftmaxRNNForCausalLM,
        config: RunConfig,
        folder: RunFolder,
        corpus: PreparedCorpus,
        train_blocks: Rows,
        test_blocks: Rows,
        stop: StopRequest,
        **kwargs: Any,
    ) -> None:
        self.config, self.folder, self.corpus, self.stop = config, folder, corpus, stop
        self._saving_to: Path | None = None
        self._saved_at = self._stopped_by = 0
        self._step_loss: Tensor | float = 0.0  # of the micro-batches of this step
        self._overflow = ""  # what a form said of it
        self._loss_sum: Tensor | float = 0.0  # of the steps since the last row that had an update
        self._loss_steps = self._skipped_in_a_row = 0
        self.test_losses: NDArray[np.float64] | None = None
        self.tested_at = -1
        self._bar = ProgressBar(config)
        arguments = _arguments(config, folder)
        seen = train_blocks.sampled(config.seed, config.steps * config.batch_size)
        rows = MetricRows(config, folder, seen.tokens)
        super().__init__(
            model,
            config.fsdp and arguments.world_size > 1,
            args=arguments,
            train_dataset=seen,
            eval_dataset=test_blocks,
            compute_metrics=self._test_metrics,
            callbacks=[rows, self._bar, Checkpoints(self._asked_to_stop)],
            **kwargs,
        )
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)

    def train(self, resume_from_checkpoint: Path | None = None) -> None:
        """Train to the end, from the beginning or from a checkpoint.

        Raises:
            RunStopped: if a stop was requested; a checkpoint holds the last step.
            NonFiniteError: if a step's loss or gradient is not finite, and may not be skipped.
            CheckpointError: if a checkpoint cannot be written.
            CorpusError: if the prepared corpus changes meanwhile.
            ChildProcessError: if another process of the run ended.
        """
        start = resume_from_checkpoint
        if start is not None:
            self._go_on_from(start)
        try:
            super().train(resume_from_checkpoint=None if start is None else str(start))
        except RuntimeError as error:
            if not _of_other_processes(error):
                raise
            raise ChildProcessError(
                f"Another process of this run ended, or cannot be reached ({error}). Last "
                f"checkpoint: {self._last_kept()}; --resume goes on from it."
            ) from error
        finally:
            self._bar.close()  # what is printed next has a line of its own
        if self._stopped_by:
            raise self._stopped()

    def _go_on_from(self, checkpoint: Path) -> None:
        progress = json.loads((checkpoint / _PROGRESS).read_text(encoding="utf-8"))
        sums = progress["loss_sums"]
        as_many = len(sums) == self.args.world_size
        self._loss_sum = sums[self.args.process_index] if as_many else sum(sums) / len(sums)
        self._loss_steps = progress["loss_steps"]
        self._skipped_in_a_row = progress["skipped_in_a_row"]
        self._saved_at = step = step_of(checkpoint)
        due = step % self.config.evaluate_every == 0 or step == self.config.steps
        tested = [row["step"] for row in read_rows(checkpoint / self.folder.evaluations_file.name)]
        self.args.eval_on_start = due and step not in tested  # the run was stopped meanwhile

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The linear warm-up and decay of the configuration."""
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, self.config.learning_rate_factor
        )
        return self.lr_scheduler

    def _get_num_items_in_batch(self, batches: list[Any], device: torch.device) -> Tensor | None:
        """The tokens that all processes predict in a step: the first of a row is not one.

        Some versions of the base class count it.
        """
        if not batches:
            return None
        mine = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in batches)
        total: Tensor = self.accelerator.gather(mine.to(device)).sum()
        return total

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward; a step that overflows has the loss NaN."""
        try:
            loss: Tensor = super().training_step(*args, **kwargs)
        except OverflowError as error:
            if self.args.world_size > 1:  # the others wait for its gradients
                raise
            self._overflow = f": {error}"
            loss = torch.tensor(math.nan, device=self.args.device)
        self._step_loss = self._step_loss + loss
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """The norm before the update; without one if it, or the loss, is not finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        loss, self._step_loss = self._step_loss, 0.0
        overflow, self._overflow = self._overflow, ""
        finite = math.isfinite(norm) and math.isfinite(loss)
        if not all(self.of_all(int(finite))):
            self._skip(model, {"loss": float(loss), "gradient norm": norm}, overflow)
        else:
            self._loss_sum = self._loss_sum + loss
            self._loss_steps += 1
            self._skipped_in_a_row = 0
        return norm

    def _skip(self, model: nn.Module, values: dict[str, float], overflow: str) -> None:
        """Make no update in this step, or stop the run."""
        bad = ((name, value) for name, value in values.items() if not math.isfinite(value))
        what, value = next(bad, ("loss", math.nan))  # else of another process
        step = self.state.global_step + 1
        told = f"The {what} of step {step} is {value}{overflow}"
        if self._skipped_in_a_row >= self.config.skip_non_finite:
            raise NonFiniteError(
                f"{told}; the run stopped before the update, with {self._skipped_in_a_row} steps "
                f"skipped in a row. Last checkpoint: {self._last_kept()}. With a larger "
                "--skip_non_finite --resume passes over the step; a new run may want a smaller "
                "--learning_rate or a --gradient_clip."
            )
        self._skipped_in_a_row += 1
        model.zero_grad(set_to_none=True)  # AdamW passes over parameters without a gradient
        if self.is_world_process_zero():
            event = {"step": step, "event": "non_finite", "what": what, "value": str(value)}
            append_row(self.folder.events_file, event)
            notice(f"{told}: it makes no update.")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the base class; a row's loss is the mean over its steps that made an update."""
        if "loss" in logs:
            total, steps = self._gathered_loss().mean().item(), self._loss_steps
            logs["loss"] = total / steps if steps else math.nan
            self._loss_sum, self._loss_steps = 0.0, 0
        super().log(logs, start_time)

    def _gathered_loss(self) -> Tensor:
        """[processes] the losses since the last row."""
        mine = torch.as_tensor(self._loss_sum, dtype=torch.float32, device=self.args.device)
        return self.accelerator.gather(mine.reshape(1))

    def _asked_to_stop(self) -> bool:
        self._stopped_by = foremost(self.of_all(self.stop.code))
        return self._stopped_by != 0

    def _stopped(self) -> RunStopped:
        step = self.state.global_step
        code = foremost((self._stopped_by, self.stop.code))  # one may have come meanwhile
        return RunStopped(code, f"after step {step}, which checkpoint-{step} holds")

    def _last_kept(self) -> str:
        kept = self.folder.checkpoints
        return str(kept[-1]) if kept else "none"

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the base class; can be stopped at every batch."""
        try:
            return super().evaluate(*args, **kwargs)
        except _EvaluationStopped:
            if self._saved_at != self.state.global_step:
                self._save_checkpoint(self.model, None)
            raise self._stopped() from None

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's loss, every block's loss, and every block's number of predicted tokens."""
        if self._asked_to_stop():
            raise _EvaluationStopped
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
        with self.together():
            self.corpus.check_unchanged()  # what was learned from other text is not kept
        name = f"checkpoint-{self.state.global_step}"
        aside = self._saving_to = self.folder.path / f".{name}.parts"  # of all processes
        losses = self._gathered_loss().tolist()
        try:
            with self.together():
                super()._save_checkpoint(model, trial)
            with self.together():
                if self.is_world_process_zero():
                    self._complete(aside / name, losses)
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, _NOT_OF_THE_DISK) or _of_other_processes(error):
                raise
            free = shutil.disk_usage(self.folder.path).free / 2**20
            raise CheckpointError(
                f"{name} could not be written: {error}. Its disk has {free:,.0f} MiB left. "
                f"Last checkpoint: {self._last_kept()}; when there is room, --resume goes on from "
                "it."
            ) from error
        finally:
            self._saving_to = None
            if self.is_world_process_zero():
                shutil.rmtree(aside, ignore_errors=True)
        self._saved_at = self.state.global_step

    def _complete(self, made: Path, losses: list[float]) -> None:
        """What one process adds to a checkpoint, until it has its name."""
        (made / "training_args.bin").unlink(missing_ok=True)  # a pickle of what config.yaml says
        progress = {
            "loss_sums": losses,
            "loss_steps": self._loss_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
        }
        write_json(made / _PROGRESS, progress)
        self.folder.copy_rows(made)
        seal(made)
        self.folder.add_checkpoint(made, self.config.keep_checkpoints)

    def _save_rng_state(self, output_dir: str) -> None:
        """As the base class, with numbers in place of NumPy's array: its pickle needs trust."""
        super()._save_rng_state(output_dir)
        one, many = "rng_state.pth", f"rng_state_{self.args.process_index}.pth"
        path = Path(output_dir) / (one if self.args.world_size == 1 else many)
        with torch.serialization.safe_globals(_NUMPY):
            states = torch.load(path, weights_only=True)
        name, keys, *rest = states["numpy"]
        torch.save({**states, "numpy": (name, keys.tolist(), *rest)}, path)


def _of_other_processes(error: Exception) -> bool:
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


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
        ddp_find_unused_parameters=False,
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
        log_level_replica="error",  # as all of transformers, but for other processes
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
