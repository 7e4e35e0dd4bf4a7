"""Estimate what a run will cost before it starts: parameters, operations, hours, memory, disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from softmax_rnn._utils.errors import require_choice
from softmax_rnn.training.config import RunConfig

# Dense bfloat16 operations per second, from the data sheets.
GPUS = {"A100-80GB": 312e12, "H100-80GB": 989e12, "H200": 989e12, "L40S": 362e12}
# The share of that peak which training these models reaches.
UTILISATION = 0.4


@dataclass(frozen=True)
class Cost:
    """The cost of one run.

    Attributes:
        parameters: number of parameters.
        tokens: number of training tokens.
        operations: floating-point operations, forward and backward.
        gpu_hours: hours on the GPU at 40% of its peak.
        memory_bytes: weights, gradients and AdamW's moments in float32, and activations.
        disk_bytes: the checkpoints that are kept, and one that is being written.
    """

    parameters: int
    tokens: int
    operations: float
    gpu_hours: float
    memory_bytes: float
    disk_bytes: float


def cost(config: RunConfig, gpu: str) -> Cost:
    """Estimate a run's cost on ``gpu``, one of ``GPUS``.

    Operations are 6 per parameter and token (the embedding is not counted), and, for the scores and
    sums of attention, 6 per layer, channel and visible key of each token. Activations are those of
    a Llama layer in bfloat16 without the score matrix, and the logits in float32.
    """
    require_choice("GPU", gpu, GPUS)
    vocabulary = _vocabulary(config)
    # Without seed and corpus in the key, runs of the same size share one meta model.
    sized = replace(config, seed=0, corpus="", vocab_size=vocabulary)
    parameters = _parameters(json.dumps(sized.to_dict()))
    tokens = config.steps * config.tokens_per_step
    matrices = parameters - vocabulary * config.hidden_size
    attention = config.num_layers * config.hidden_size * config.block_size
    operations = 6.0 * tokens * (matrices + attention)
    micro = config.tokens_per_step // config.accumulation
    layer = 10 * config.hidden_size + 4 * config.intermediate_size
    layers = 1 if config.gradient_checkpointing else config.num_layers
    kept = config.num_layers * config.hidden_size if config.gradient_checkpointing else 0
    activations = micro * (2 * (layers * layer + kept) + 8 * vocabulary)
    return Cost(
        parameters=parameters,
        tokens=tokens,
        operations=operations,
        gpu_hours=operations / (GPUS[gpu] * UTILISATION) / 3600,
        memory_bytes=16.0 * parameters + activations,
        disk_bytes=12.0 * parameters * (config.keep_checkpoints + 1),
    )


def hours_text(hours: float) -> str:
    """A readable time: ``< 1 min``, ``12 min``, ``3.2 h``, ``13 h``."""
    if hours < 1:
        return "< 1 min" if 60 * hours < 1 else f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 9.95 else f"{hours:,.0f} h"


def count_text(count: float) -> str:
    """A readable number of tokens or parameters: ``1.5 M``, ``3.7 B``."""
    return f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.1f} B"


def bytes_text(size: float) -> str:
    """A readable size: ``25 MiB``, ``9.2 GiB``."""
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


def _vocabulary(config: RunConfig) -> int:
    """Rows of the embedding; Llama 2's for any tokenizer but bytes, since none is loaded."""
    from softmax_rnn.data import is_task, parse_task  # slow to import

    if is_task(config.corpus):
        return config.vocab_size or parse_task(config.corpus, config.block_size).vocab_size
    return config.vocab_size or (257 if config.tokenizer == "bytes" else 32_000)


@lru_cache(maxsize=256)
def _parameters(fields: str) -> int:
    from softmax_rnn.models import (
        SoftmaxRNNForCausalLM,
    )  # slow to import; GPUS is needed without it
    from softmax_rnn.training.run import model_config

    config = RunConfig.from_dict(json.loads(fields))
    with torch.device("meta"):
        model = SoftmaxRNNForCausalLM(model_config(config, _vocabulary(config), 0))
    return int(model.num_parameters())
