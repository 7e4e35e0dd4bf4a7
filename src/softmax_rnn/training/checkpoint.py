"""Checkpoints: every process writes weights and optimizer states; find an intact checkpoint.

model.safetensors    all weights, for ``from_pretrained``; a sharded run and a conversion write it
                     only at their end
state/*.safetensors  optimizer states, and what is trained in a sharded run or a conversion; one
                     file per process
progress.json        the unfinished row of metrics
*.jsonl              the rows so far
manifest.json        size and hash of every file
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from transformers import AutoConfig, PreTrainedModel

from softmax_rnn._utils.integrity import MANIFEST, damage
from softmax_rnn._utils.progress import notice
from softmax_rnn.models.configuration import SoftmaxRNNConfig
from softmax_rnn.models.loading import load_model
from softmax_rnn.models.modeling import SoftmaxRNNForCausalLM, SoftmaxRNNForMaskedLM
from softmax_rnn.training.distributed import OTHER_FAILED
from softmax_rnn.training.folder import RunFolder

PROGRESS = "progress.json"
STATE = "state"
_WEIGHTS = "model.safetensors"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CheckpointError(OSError):
    """A checkpoint cannot be written, or no checkpoint can be read."""


def whole_weights(model: PreTrainedModel) -> dict[str, Any]:
    """All weights of a model that may be sharded, in the first process; all processes call this."""
    return get_model_state_dict(model, options=_WHOLE)


def write_state(
    checkpoint: Path, model: PreTrainedModel, optimizer: Optimizer, rank: int, *, weights: bool
) -> None:
    """Write the optimizer's states, and the weights if ``weights``: one file per process."""
    tensors = _tensors(model, optimizer, weights)
    if not tensors:  # every step so far was skipped
        return
    writer = HuggingFaceStorageWriter(str(checkpoint / STATE), save_distributed=True)
    with _raising_own_failure(rank):
        save(tensors, storage_writer=writer, no_dist=not torch.distributed.is_initialized())


def read_state(checkpoint: Path, model: PreTrainedModel, optimizer: Optimizer, rank: int) -> None:
    """Load a checkpoint of any number of processes into a model and its new optimizer."""
    state = checkpoint / STATE
    reader = HuggingFaceStorageReader(str(state))
    saved = reader.read_metadata().state_dict_metadata if state.exists() else {}
    apart = any(key.startswith("model.") for key in saved)
    if not apart:
        weights: dict[str, Any] = load_file(checkpoint / _WEIGHTS)
        set_model_state_dict(model, weights, options=_WHOLE)
    if any(key.startswith("optimizer.") for key in saved):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    tensors = _tensors(model, optimizer, apart)
    if not tensors:
        return
    with _raising_own_failure(rank):
        load(tensors, storage_reader=reader, no_dist=not torch.distributed.is_initialized())


def _tensors(model: PreTrainedModel, optimizer: Optimizer, weights: bool) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"optimizer.{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    if weights:
        tensors |= {f"model.{name}": x.detach() for x, name in names.items() if x.requires_grad}
    return tensors


@contextlib.contextmanager
def _raising_own_failure(rank: int) -> Iterator[None]:
    """Raise this process's failure instead of torch's error, which combines those of all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
            yield
    except CheckpointException as error:
        if rank not in error.failures:
            raise ChildProcessError(OTHER_FAILED) from error
        cause = error.failures[rank][0]
        raise (cause if isinstance(cause, Exception) else RuntimeError(cause)) from error


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The progress of a run without its tensors; ``CheckpointError`` for earlier versions."""
    progress: dict[str, Any] = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
    if "loss_sum" not in progress:
        raise CheckpointError(
            f"{checkpoint} was written by an earlier version of softmax-rnn, which can resume it; "
            "this version cannot."
        )
    return progress


def newest_whole(checkpoints: Sequence[Path]) -> tuple[Path | None, dict[str, str]]:
    """The newest intact checkpoint, and the damage of later ones; ``checkpoints`` oldest first.

    Raises:
        CheckpointError: if there are checkpoints, and all are damaged.
    """
    skipped: dict[str, str] = {}
    for checkpoint in reversed(checkpoints):
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint, skipped
        skipped[checkpoint.name] = wrong
    if skipped:
        listed = "; ".join(f"{name}: {wrong}" for name, wrong in skipped.items())
        raise CheckpointError(
            f"No checkpoint in {checkpoints[0].parent} is intact ({listed}). Restore one from a "
            "backup, or remove them all to start from the first step."
        )
    return None, skipped


def model_folder(path: Path) -> Path:
    """The folder of a saved model: ``path`` itself, or a run's newest intact checkpoint.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: if ``path`` is a damaged checkpoint.
        CheckpointError: if all checkpoints of a run are damaged.
    """
    if (path / "config.json").exists():
        run = RunFolder(path.parent)
        sealed = path in run.checkpoints or (path / MANIFEST).exists()
        if run.exists and sealed and (wrong := damage(path)):
            raise ValueError(f"{path} is damaged: {wrong}.")
        return path
    run = RunFolder(path)
    while checkpoints := run.checkpoints:
        if not run.exists:  # written by another trainer, without hashes
            return checkpoints[-1]
        try:
            found, left_out = newest_whole(checkpoints)
        except CheckpointError:
            if any(checkpoint.exists() for checkpoint in checkpoints):
                raise
            continue  # the run has replaced them: look again
        for name, wrong in left_out.items():
            notice(f"{name} is left out: {wrong}.")
        assert found is not None
        return found
    runs = sorted(found.parent.name for found in path.glob("*/config.yaml"))
    hint = f" Name one of its runs: {', '.join(runs[:8])}." if runs else ""
    raise FileNotFoundError(
        f"{path} holds no model: neither config.json nor a checkpoint-N folder.{hint}"
    )


def load_trained(folder: Path) -> PreTrainedModel:
    """The model in a folder of :func:`model_folder`; ``ValueError`` if it cannot be loaded."""
    if (folder / _WEIGHTS).exists() or not (folder / STATE).exists():
        return load_model(folder)
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, SoftmaxRNNConfig):
        raise ValueError(
            f"{folder} holds what was trained of a conversion so far: finish the run to use it."
        )
    kind = SoftmaxRNNForCausalLM if config.is_causal else SoftmaxRNNForMaskedLM
    model = kind(config)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    with _raising_own_failure(rank=0):
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / STATE)), no_dist=True)
    return model
