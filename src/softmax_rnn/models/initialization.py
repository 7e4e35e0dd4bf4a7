"""Initial values that depend only on a parameter's name, so that variants start equal."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import PreTrainedModel

from softmax_rnn.ops import LayerPart


def initialize(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter from (seed, module name): Llama's rule, normal with initializer_range.

    Biases start at 0, norms at 1, the parts of an attention layer at values of their own. So an
    extra gate changes no other parameter: the shared parameters of two variants start bitwise
    equal. The global random state is restored.
    """
    with torch.random.fork_rng():
        for name, module in model.named_modules():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            if isinstance(module, LayerPart):
                module.reset_parameters()
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=model.config.initializer_range)
            elif getattr(module, "weight", None) is not None:
                nn.init.ones_(module.weight)  # RMSNorm
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    model.tie_weights()


def reset_unloaded(model: nn.Module) -> None:
    """Initialise the layers' own parameters and buffers, except those that were loaded."""
    for module in model.modules():
        if isinstance(module, LayerPart):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            loaded = [x for x in own if getattr(x, "_is_hf_initialized", False)]
            values = [x.detach().clone() for x in loaded]
            module.reset_parameters()
            with torch.no_grad():
                for x, value in zip(loaded, values, strict=True):
                    x.copy_(value)
