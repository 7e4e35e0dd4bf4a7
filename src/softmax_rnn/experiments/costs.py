"""Estimate what a run will cost before it starts: parameters, operations, hours, memory, disk."""

from __future__ import annotations

import json
import math
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
        gpu_hours: hours on the GPU at 40% of its peak; NaN without a GPU.
        memory_bytes: weights, gradients and AdamW's moments in float32, and activations.
        disk_bytes: the checkpoints that are kept, and one that is being written.
    """

    parameters: int
    tokens: int
    operations: float
    gpu_hours: float
    memory_bytes: float
    disk_bytes: float


def chosen_gpu(name: str | None) -> str | None:
    """The GPU of ``GPUS`` that is named, else this machine's; ``None`` if it has none of these.

    Raises:
        ValueError: for an unknown name.
    """
    if name is not None:
        require_choice("GPU", name, GPUS)
        return name
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((gpu for gpu in GPUS if gpu.partition("-")[0] in here), None)


def gpu_hours(operations: float, gpu: str | None) -> float:
    """The hours of these operations on one of ``GPUS``; NaN for ``None``."""
    if gpu is None:
        return math.nan
    require_choice("GPU", gpu, GPUS)
    return operations / (GPUS[gpu] * UTILISATION) / 3600


def times_on(gpu: str | None) -> str:
    """What a table says of the times in it."""
    if gpu is None:
        return f"for times on a GPU add --gpu, such as --gpu {next(iter(GPUS))}"
    return f"times on one {gpu} at {UTILISATION:.0%} of its peak"


def cost(config: RunConfig, gpu: str | None) -> Cost:
    """Estimate a run's cost on ``gpu``, one of ``GPUS``, or ``None`` for no times.

    Operations are 6 per parameter and token (the embedding is not counted), and, for the scores and
    sums of attention, 6 per layer, channel and visible key of each token. Activations are those of
    a Llama layer in bfloat16 without the score matrix, and the logits in float32.
    """
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
        gpu_hours=gpu_hours(operations, gpu),
        memory_bytes=16.0 * parameters + activations,
        disk_bytes=12.0 * parameters * (config.keep_checkpoints + 1),
    )


def _vocabulary(config: RunConfig) -> int:
    """Rows of the embedding; Llama 2's for any tokenizer but bytes, since none is loaded."""
    from softmax_rnn.data import is_task, parse_task  # slow to import

    if is_task(config.corpus):
        return config.vocab_size or parse_task(config.corpus, config.block_size).vocab_size
    ids = 257 if config.tokenizer == "bytes" else 32_000
    return config.vocab_size or ids + (not config.causal)


@lru_cache(maxsize=256)
def _parameters(fields: str) -> int:
    from softmax_rnn.training.run import new_model  # slow to import; GPUS is needed without it

    config = RunConfig.from_dict(json.loads(fields))
    with torch.device("meta"):
        model = new_model(config, _vocabulary(config), 0)
    return int(model.num_parameters())
