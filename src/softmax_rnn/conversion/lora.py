"""Low-rank additions to a model's linear layers (LoRA), by the package ``peft``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from softmax_rnn._utils.errors import missing_extra
from softmax_rnn.conversion.layer import ConvertedLayer

_NAME = "default"  # peft's own for a single adapter


def require_peft() -> None:
    """Raise ``ModuleNotFoundError`` if the package is missing, without its slow import."""
    if find_spec("peft") is None:
        raise missing_extra("convert", "lora_rank > 0", ModuleNotFoundError(name="peft"))


def add_lora(model: PreTrainedModel, rank: int, seed: int) -> None:
    """Add matrices of rank ``rank``, scaled by 2, to the linear layers of the base model.

    Those of a converted attention's own parts get none, nor does the output layer.
    """
    require_peft()
    import peft

    parts = [part for part in model.base_model.modules() if isinstance(part, ConvertedLayer)]
    own = {module for part in parts for module in part.modules()}
    layers = {
        name: module
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in own
    }
    if not layers:
        raise ValueError(f"lora_rank={rank}: {type(model).__name__} has no linear layers; give 0.")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=list(layers),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in layers.values()),
        )
        peft.inject_adapter_in_model(settings, model)


def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights under the names that they have without the additions, which they contain."""
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    added = {
        f"{name}.base_layer.weight": layer.get_delta_weight(_NAME).detach()
        for name, layer in layers.items()
    }
    return {
        name.replace(".base_layer.", "."): weight + added[name] if name in added else weight
        for name, weight in model.state_dict().items()
        if ".lora_" not in name
    }


@contextlib.contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """The model without its additions."""
    from peft.helpers import rescale_adapter_scale

    with rescale_adapter_scale(model, 0.0):
        yield
