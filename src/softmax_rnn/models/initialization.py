"""Initial values that depend on a parameter's name alone, so that variants start equal."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedModel


def initialize(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter afresh, by the model's own rule, from (seed, module name).

    A variant with an extra gate thus moves no other parameter: what two variants share starts
    equal, to the last bit. The global random state is left as it was.
    """
    with torch.random.fork_rng():
        for name, module in model.named_modules():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            model._init_weights(module)
    model.tie_weights()
