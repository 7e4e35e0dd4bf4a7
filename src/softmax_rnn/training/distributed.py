"""One run on several processes: shared failures, sharded models."""

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
# References to destroyed process groups. If DDP held the last reference, it would hold the GIL
# while it joins the group's threads, and one of these threads may be waiting for the GIL.
_DESTROYED_GROUPS: list[Any] = []


@contextlib.contextmanager
def leaving_its_group() -> Iterator[None]:
    """Destroy the process group that a run joins: gloo's threads would abort Python at exit.

    After a failed backward pass the group is kept, since its communication may never end.
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
            _DESTROYED_GROUPS.append(distributed.group.WORLD)
            distributed.destroy_process_group()


def require_a_group() -> None:
    """Raise ``ValueError`` if the process group of an earlier run of this process was left."""
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    if several and _DESTROYED_GROUPS and not _in_a_group():
        raise ValueError(
            "A process started by torchrun can train once: start another torchrun for the next run."
        )


def _in_a_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def gather(accelerator: Accelerator, *values: float) -> list[list[float]]:
    """The values of every process, [processes, values]; all processes call this."""
    mine = torch.tensor([values], dtype=torch.float64, device=accelerator.device)
    gathered: list[list[float]] = accelerator.gather(mine).tolist()
    return gathered


@contextlib.contextmanager
def together(accelerator: Accelerator) -> Iterator[None]:
    """If one process fails, raise in all of them: none waits for another.

    The others raise ``ChildProcessError``.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # any error: the other processes are waiting
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

    This uses torch's own function, since accelerate shards only on GPUs.
    """
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
