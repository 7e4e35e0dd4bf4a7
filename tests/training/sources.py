"""Pretrained models for tests: tiny, random, with the tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from softmax_rnn.data import load_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def save_source(folder: Path, family: str = "Llama", **fields: Any) -> Path:
    """A model of a family in a folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return folder
