"""Folders of finished runs with given losses, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from softmax_rnn.training import RunConfig
from softmax_rnn.training.folder import RunFolder, append_row

BLOCKS = 30


def made_up(
    root: Path,
    attention: str,
    seed: int,
    loss: float,
    split: str = "a",
    accuracy: float | None = None,
    every: int = 50,
    **fields: Any,
) -> RunFolder:
    """A finished run's folder whose losses end near ``loss``, and accuracies near ``accuracy``.

    It is evaluated ``every`` so many of its 200 steps, and at the last one.
    """
    folder = RunFolder(root / f"{attention}-{seed}")
    folder.path.mkdir(parents=True)
    RunConfig(attention=attention, seed=seed, **fields).save(folder.config_file)
    draw = np.random.default_rng(seed)
    blocks = draw.normal(0, 0.2, BLOCKS)  # the same for every variant: pairing removes it
    losses = loss + blocks + np.random.default_rng([seed, len(attention)]).normal(0, 0.01, BLOCKS)
    np.save(folder.path / "test_losses.npy", losses)
    for step in range(10, 201, 10):
        row = {"step": step, "tokens": step * 2048, "loss": loss + 5 / step}
        append_row(
            folder.metrics_file,
            {**row, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e4},
        )
        if step % every == 0 or step == 200:
            row = {"step": step, "tokens": step * 2048, "test_loss": loss + 6 / step}
            if accuracy is not None:
                row["test_accuracy"] = accuracy * step / 200
            append_row(folder.evaluations_file, row)
    summary = {
        "parameters": 1000 + len(attention),
        "train_loss": loss,
        "test_loss": float(losses.mean()),
        "tokens_per_second": 12345.0,
        "peak_memory_bytes": 2**30,
        "skipped_steps": 0,
        "loss_spikes": 0,
        "seconds": 60.0,
    }
    if accuracy is not None:
        wrong = np.full(BLOCKS, 1 - accuracy) + draw.normal(0, 0.002, BLOCKS)
        wrong = wrong.clip(0, 1)
        np.save(folder.path / "test_errors.npy", wrong)
        summary |= {"test_accuracy": float(1 - wrong.mean()), "steps": 200}
    (folder.path / "summary.json").write_text(json.dumps(summary))
    corpus = {name: {"tokens": 9, "sha256": split * 64} for name in ("train", "test")}
    (folder.path / "environment.json").write_text(
        json.dumps({"python": "<b>3</b>", "corpus": corpus})
    )
    return folder
