"""A model whole on every process or sharded over them, with one format of checkpoints for both."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import Trainer

OTHER_FAILED = "Another process of this run failed; it tells why."
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
# Groups that were left. DDP must not be the last to let go of one: it holds Python's lock while it
# waits for the group's threads, and one of them may be waiting for that lock.
_LEFT: list[Any] = []
_WEIGHTS, _OPTIMIZER, _SCHEDULER = "model.safetensors", "optimizer.pt", "scheduler.pt"


@contextlib.contextmanager
def leaving_its_group() -> Iterator[None]:
    """A run that joins a group of processes leaves it: threads of gloo abort an interpreter's end.

    It stays where leaving may wait for ever: what fails in a backward pass has sums under way.
    """
    joined_before = _in_a_group()
    under_way = False
    try:
        yield
    except (RuntimeError, MemoryError):
        under_way = True
        raise
    finally:
        if _in_a_group() and not joined_before and not under_way:
            _LEFT.append(distributed.group.WORLD)
            distributed.destroy_process_group()


def _in_a_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


class ShardingTrainer(Trainer):
    """Trains a model that may be sharded (FSDP2), a decoder layer at a time.

    Checkpoints hold whole weights, and the optimizer's state by the names of parameters, so that a
    run can go on with any number of processes, sharded or not.

    Args:
        model: a causal language model.
        sharded: whether to shard it over the processes.
        kwargs: the base class's.
    """

    def __init__(self, model: Any, sharded: bool, **kwargs: Any) -> None:
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        super().__init__(model=model, **kwargs)
        if sharded:
            # Accelerate would wrap it in DDP: it shards by itself on GPUs alone.
            prepare = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
            self.accelerator.prepare_model = prepare

    def of_all(self, value: int) -> list[int]:
        """A value of every process; all of them ask."""
        if self.args.world_size == 1:
            return [value]
        mine = torch.tensor([value], device=self.args.device)
        values: list[int] = self.accelerator.gather(mine).tolist()
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails here in one process fails in all, and none is left waiting for another.

        Raises:
            ChildProcessError: if it failed in another process.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:  # of any kind: the others are waiting
            mine = error
        try:
            failed = any(self.of_all(int(mine is not None)))
        except Exception as error:
            raise mine or error from None
        if mine is not None:
            raise mine
        if failed:
            raise ChildProcessError(OTHER_FAILED)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole weights; all processes call this, one writes."""
        state = get_model_state_dict(self.model, options=_WHOLE)
        with self.together():
            if self.args.should_save:
                self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        raw = self.optimizer.optimizer
        fresh = not raw.state  # every step so far was skipped
        state = get_optimizer_state_dict(self.model, raw, options=_WHOLE)
        if fresh:  # to have something to return, that call made an update of nothing
            raw.state.clear()
            state["state"] = {}
        with self.together():
            if self.args.should_save:
                torch.save(state, Path(output_dir, _OPTIMIZER))
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights: dict[str, Any] = load_file(Path(resume_from_checkpoint, _WEIGHTS))
        set_model_state_dict(self.model, weights, options=_WHOLE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer, scheduler = (
            torch.load(Path(checkpoint, name), map_location="cpu", weights_only=True)
            for name in (_OPTIMIZER, _SCHEDULER)
        )
        raw = self.optimizer.optimizer
        set_optimizer_state_dict(self.model, raw, optimizer, options=_WHOLE)
        if not optimizer["state"]:
            raw.state.clear()
        for group in raw.param_groups:
            group["betas"] = tuple(group["betas"])  # a list by now; the next file is to be the same
        self.lr_scheduler.load_state_dict(scheduler)
