"""One run on several processes: what fails together, and models sharded over them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import distributed
from torch.distributed.fsdp import fully_shard

OTHER_FAILED = "Another process of this run failed; it reports why."
# Process groups that were destroyed. DDP must not hold the last reference: it keeps Python's lock
# while it joins the group's threads, and one of them may be waiting for that lock.
_LEFT: list[Any] = []


@contextlib.contextmanager
def leaving_its_group() -> Iterator[None]:
    """Leave the process group that a run joins: gloo's threads abort the interpreter at its end.

    The group stays after a failed backward pass, whose communication may never end.
    """
    joined_before = _in_a_group()
    communicating = False
    try:
        yield
    except (RuntimeError, MemoryError):
        communicating = True
        raise
    finally:
        if _in_a_group() and not joined_before and not communicating:
            _LEFT.append(distributed.group.WORLD)
            distributed.destroy_process_group()


def require_a_group() -> None:
    """Raise ``ValueError`` if the process group of an earlier run of this process was left."""
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    if several and _LEFT and not _in_a_group():
        raise ValueError(
            "A process started by torchrun can train once: start another torchrun for the next run."
        )


def _in_a_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def gather(accelerator: Accelerator, *values: float) -> list[list[float]]:
    """[processes, values] the values of every process; all of them call this."""
    mine = torch.tensor([values], dtype=torch.float64, device=accelerator.device)
    gathered: list[list[float]] = accelerator.gather(mine).tolist()
    return gathered


@contextlib.contextmanager
def together(accelerator: Accelerator) -> Iterator[None]:
    """Fail in all processes if one fails (the others with ``ChildProcessError``): none waits."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind: the others are waiting
        mine = error
    try:
        failed = any(flag for (flag,) in gather(accelerator, mine is not None))
    except Exception as error:
        raise mine or error from None
    if mine is not None:
        raise mine
    if failed:
        raise ChildProcessError(OTHER_FAILED)


def of_other_processes(error: Exception) -> bool:
    """Whether an error says that another process ended, or cannot be reached."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def shard(model: Any) -> None:
    """Shard a model's weights, gradients and optimizer states (FSDP2), a decoder layer at a time.

    By torch's own function: accelerate shards on GPUs alone.
    """
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
