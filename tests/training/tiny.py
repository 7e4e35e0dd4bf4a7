"""A run small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from softmax_rnn.training import RunConfig

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 2,
    "block_size": 32,
    "batch_size": 4,
    "test_fraction": 0.2,
    "steps": 12,
    "log_every": 2,
    "evaluate_every": 6,
    "save_every": 4,
}


def tiny(texts: Path, **fields: Any) -> RunConfig:
    """A tiny run on a folder of texts."""
    return RunConfig(**{**TINY, "corpus": str(texts), **fields})
