"""A run small enough for tests, and when two are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from softmax_rnn.training import RunConfig
from softmax_rnn.training.folder import RunFolder, read_rows

TIMED = "tokens_per_second"
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


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    """All logged rows without their timing."""
    both = [*read_rows(folder.metrics_file), *read_rows(folder.evaluations_file)]
    return [{key: value for key, value in row.items() if key != TIMED} for row in both]


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder.checkpoints[-1]).state_dict()


def assert_same_run(a: RunFolder, b: RunFolder) -> None:
    assert rows(a) == rows(b)
    assert np.array_equal(a.test_losses, b.test_losses)
    for key, value in weights(a).items():
        assert torch.equal(value, weights(b)[key]), key


def options(texts: Path, out: Path, **fields: object) -> list[str]:
    """The options of a command line for a tiny run."""
    merged = {**TINY, "steps": 4, "corpus": texts, "out": out, **fields}
    return [word for key, value in merged.items() for word in (f"--{key}", str(value))]
