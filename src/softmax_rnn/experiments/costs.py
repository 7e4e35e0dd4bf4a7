"""What a run will cost, before it is started: parameters, operations, hours, memory, disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from softmax_rnn._utils.errors import require_choice
from softmax_rnn.training.config import RunConfig

# Dense bfloat16 operations a second by the makers' data sheets.
GPUS = {"A100-80GB": 312e12, "H100-80GB": 989e12, "H200": 989e12, "L40S": 362e12}
# The share of them that training of these models reaches.
UTILISATION = 0.4


@dataclass(frozen=True)
class Cost:
    """The cost of one run.

    Attributes:
        parameters: number of them.
        tokens: seen in training.
        operations: floating-point, forward and backward.
        gpu_hours: on the named GPU at 40% of its peak.
        memory_bytes: weights, gradients and AdamW's moments in float32, and activations.
        disk_bytes: the checkpoints kept, and the last ones while they are written.
    """

    parameters: int
    tokens: int
    operations: float
    gpu_hours: float
    memory_bytes: float
    disk_bytes: float


def cost(config: RunConfig, gpu: str) -> Cost:
    """Estimate a run's cost on ``gpu``, one of ``GPUS``.

    Operations are 6 a parameter and token (embeddings looked up are not counted) and 6 a layer,
    channel and visible key for the scores and sums of attention. Activations are those of a Llama
    layer in bfloat16 with memory-lean attention, and the logits in float32.
    """
    require_choice("GPU", gpu, GPUS)
    # Sizes alone count: one meta model serves every seed, corpus and schedule.
    parameters = _parameters(json.dumps(replace(config, seed=0, corpus="").to_dict()))
    vocabulary = _vocabulary(config)
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
    """A time for people: ``< 1 min``, ``12 min``, ``3.2 h``, ``13 h``."""
    if hours < 1:
        return "< 1 min" if 60 * hours < 1 else f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 9.95 else f"{hours:,.0f} h"


def count_text(count: float) -> str:
    """A number of tokens or parameters for people: ``1.5 M``, ``3.7 B``."""
    return f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.1f} B"


def bytes_text(size: float) -> str:
    """A size for people: ``25 MiB``, ``9.2 GiB``."""
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


def _vocabulary(config: RunConfig) -> int:
    """Rows of the embedding; the tokenizer is not loaded: bytes and an end, or Llama 2's."""
    return config.vocab_size or (257 if config.tokenizer == "bytes" else 32_000)


@lru_cache(maxsize=256)
def _parameters(fields: str) -> int:
    from softmax_rnn.models import SoftmaxRNNForCausalLM  # GPUS is read without transformers
    from softmax_rnn.training.run import model_config

    config = RunConfig.from_dict(json.loads(fields))
    with torch.device("meta"):
        model = SoftmaxRNNForCausalLM(model_config(config, _vocabulary(config), 0))
    return int(model.num_parameters())
