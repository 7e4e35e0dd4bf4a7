"""A run's folder, read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.training import RunConfig
from softmax_rnn.training.folder import RunFolder

ROW = {
    "step": 1,
    "tokens": 8,
    "loss": 2.5,
    "learning_rate": 0.1,
    "grad_norm": 1,
    "tokens_per_second": 1.0,
}
SECOND = {**ROW, "step": 2, "tokens": 16}


def _with_metrics(path: Path, rows: Iterable[Any]) -> RunFolder:
    folder = RunFolder(path)
    folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_whole_number_is_a_number_however_large(tmp_path: Path) -> None:
    """pandas keeps what is beyond 64 bits as Python's integers, with which numpy cannot reckon."""
    metrics = _with_metrics(tmp_path, [{**ROW, "loss": 2**64}, SECOND]).metrics
    assert {str(metrics[name].dtype) for name in ("loss", "grad_norm")} == {"float64"}
    assert np.sqrt(metrics.loss)[0] == 2.0**32
    assert metrics.step.tolist() == [1, 2]


def test_a_gradient_that_overflowed_has_no_norm(tmp_path: Path) -> None:
    metrics = _with_metrics(tmp_path, [{**ROW, "grad_norm": None}]).metrics
    assert metrics.grad_norm.dtype == np.float64
    assert metrics.grad_norm.isna().all()


@pytest.mark.parametrize(
    "row",
    [
        {**SECOND, "learning_rate": [0.1]},
        {**SECOND, "learning_rate": "0.1"},
        {key: value for key, value in SECOND.items() if key != "learning_rate"},
        [1, 2],
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, row: Any) -> None:
    folder = _with_metrics(tmp_path, [ROW, row])
    with pytest.raises(
        ValueError, match=r"metrics.jsonl, line 2: .*(must be|learning_rate is missing)"
    ):
        _ = folder.metrics


def test_an_attention_may_be_saved_with_the_fields_of_its_time(tmp_path: Path) -> None:
    """A run of an earlier version, whose attention had fewer fields, is the same run."""
    folder = RunFolder(tmp_path)
    mine = {"series": "taylor", "order": 2}
    now = RunConfig(attention=AttentionSpec(**mine).to_dict())
    RunConfig(attention=mine).save(folder.config_file)
    folder.environment_file.write_text(json.dumps({"attention": mine}))
    folder.check_same_config(now)
    for other in ({**mine, "order": 3}, {**mine, "decay": "token"}):
        with pytest.raises(ValueError, match=r"with another configuration \(attention: "):
            folder.check_same_config(RunConfig(attention=other))
    with pytest.raises(ValueError, match=r"with another configuration \(steps: 1000 there, 10 now"):
        folder.check_same_config(RunConfig(attention=mine, steps=10))
