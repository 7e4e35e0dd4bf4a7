"""A run's folder, read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from softmax_rnn.training.folder import RunFolder


def test_a_whole_number_is_a_number_however_large(tmp_path: Path) -> None:
    """pandas keeps what is beyond 64 bits as Python's integers, with which numpy cannot reckon."""
    row = {"step": 1, "tokens": 8, "learning_rate": 0.1, "grad_norm": 1, "tokens_per_second": 1.0}
    rows = [{**row, "loss": 2**64}, {**row, "step": 2, "tokens": 16, "loss": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    metrics = RunFolder(tmp_path).metrics
    assert {str(metrics[name].dtype) for name in ("loss", "grad_norm")} == {"float64"}
    assert np.sqrt(metrics.loss)[0] == 2.0**32
    assert metrics.step.tolist() == [1, 2]
