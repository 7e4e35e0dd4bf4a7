"""Models with the same weights: Hugging Face's Llama, and ours with several attentions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from softmax_rnn.models import from_llama, initialize
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.run import model_config

# Rows of the embedding: bytes and an end-of-text token; Llama 2's. No tokenizer is loaded.
VOCABULARY = {"demo": 257, "small": 32_000, "smollm2": 49_152}
# The shape of a pretrained model, with the other settings of the preset demo: SmolLM2-135M's.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
    }
}
PRESET = {"cpu": "demo", "cuda": "small"}
# Hugging Face's contestants and their attention; "eager" computes N x N weights.
LLAMA = {"llama": "sdpa", "llama materialised": "eager"}


def run_config(preset: str, batch: int | None = None) -> RunConfig:
    """A preset, with the vocabulary given and one step of one batch."""
    fields: dict[str, Any] = {"vocab_size": VOCABULARY[preset], "steps": 1, "accumulation": 1}
    if batch is not None:
        fields["batch_size"] = batch
    shape = SHAPES.get(preset)
    return RunConfig.preset(preset if shape is None else "demo", **(shape or {}), **fields)


def models(config: RunConfig, variants: list[str], device: str) -> dict[str, Any]:
    """Llamas by ``LLAMA``, and ours by their variants, all with the weights of the first.

    A variant's own gates are the only weights that differ.
    """
    assert config.vocab_size is not None
    fields = model_config(config, config.vocab_size, end_of_text=0).to_dict()
    for key in ("model_type", "architectures", "transformers_version", "attention"):
        fields.pop(key, None)
    made: dict[str, Any] = {}
    for name, way in LLAMA.items():
        made[name] = AutoModelForCausalLM.from_config(
            LlamaConfig(**fields), attn_implementation=way
        ).to(device)
        assert made[name].config._attn_implementation == way
        initialize(made[name], seed=0)
    for variant in variants:
        made[variant] = from_llama(made["llama"], variant)
    return made


def tokens(config: RunConfig, shape: tuple[int, int], device: str) -> Tensor:
    """Drawn uniformly from the vocabulary."""
    assert config.vocab_size is not None
    draw = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, shape, generator=draw).to(device)
