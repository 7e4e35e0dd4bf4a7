"""Initial values that depend on a parameter's name alone, so that variants start equal."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import PreTrainedModel

from softmax_rnn.ops.layer import Attention


def initialize(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter from (seed, module name): Llama's rule, normal with initializer_range.

    Biases start at 0, norms at 1. A variant with an extra gate thus moves no other parameter: what
    two variants share starts equal, to the last bit. The global random state is left as it was.
    """
    with torch.random.fork_rng():
        for name, module in model.named_modules():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=model.config.initializer_range)
            elif isinstance(module, Attention):
                module.reset_parameters()
            elif getattr(module, "weight", None) is not None:
                nn.init.ones_(module.weight)  # RMSNorm
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    model.tie_weights()
