"""Accuracy against the size of the state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from made_up import made_up
from softmax_rnn.report.outputs import report
from softmax_rnn.report.recall import draw_recall, recall_table
from softmax_rnn.report.sweeps import add_to_sweep
from softmax_rnn.report.table import cells, results
from softmax_rnn.training.folder import RunFolder

TASK = {
    **{"corpus": "task:mqar", "block_size": 64, "hidden_size": 64, "intermediate_size": 0},
    **{"num_heads": 1, "stop_at_accuracy": 0.99},
}


@pytest.fixture
def runs(tmp_path: Path) -> list[RunFolder]:
    names = ("softmax", "taylor:1", "taylor:2", "taylor:2+decay", "taylor_elu:1", "window:16")
    accuracies = dict(zip(names, (1.0, 0.4, 0.9, 0.8, 0.2, 0.1), strict=True))
    return [
        made_up(
            tmp_path / f"width{width}", name, seed, 1.0, accuracy=accuracy,
            **{**TASK, "layer": {"qk_dim": width}, "learning_rate": 1e-3 if seed > 9 else 2e-3},
        )
        for width in (4, 8)
        for name, accuracy in accuracies.items()
        for seed in (0, 1, 2)
    ]  # fmt: skip


def test_a_row_per_variant_and_width(runs: list[RunFolder]) -> None:
    table = recall_table(runs)
    assert len(table) == 12
    rows = table.set_index(["variant", "width"])
    taylor = rows.loc[("taylor:2", 8)]
    assert (taylor.series, taylor.order, taylor.decay) == ("taylor", 2, "")
    assert taylor.bytes == 4 * 45 * 65  # C(8 + 2, 2) monomials, 64 values and the row sum
    assert rows.loc[("taylor:2+decay", 8)].decay == "+decay"
    assert rows.loc[("softmax", 4)].bytes == 4 * 64 * (4 + 64)
    assert rows.loc[("softmax", 4)].grows
    assert pd.isna(rows.loc[("softmax", 4)].order)
    assert rows.loc[("window:16", 4)].series == "window"
    assert taylor.low < taylor.accuracy < taylor.high
    assert taylor.accuracy == pytest.approx(0.9, abs=0.005)
    assert taylor.seeds == 3
    assert taylor.steps == 200


def test_the_figure(runs: list[RunFolder], tmp_path: Path) -> None:
    paths = draw_recall(runs, "Recall", tmp_path / "recall")
    words = (tmp_path / "recall.svg").read_text()
    for shown in (
        "accuracy on the asked positions",
        "taylor_elu",
        "taylor+decay",
        "window",
        "4 wide",
    ):
        assert shown in words
    assert [path.name for path in paths] == ["recall.png", "recall.svg"]


def test_accuracy_is_in_the_table_of_a_task_alone(runs: list[RunFolder], tmp_path: Path) -> None:
    narrow = [run for run in runs if run.config.layer["qk_dim"] == 4]
    header, *rows = cells(results(narrow))
    assert "test accuracy" in header
    column = [row[header.index("test accuracy")] for row in rows]
    np.testing.assert_allclose(next(float(x) for x in column), 1.0, atol=0.005)
    text = [made_up(tmp_path / "text", "softmax", 0, 1.0, accuracy=0.5)]
    assert "test accuracy" not in cells(results(text))[0]


def test_runs_that_ended_at_different_steps_are_compared(
    runs: list[RunFolder], tmp_path: Path
) -> None:
    narrow = [run for run in runs if run.config.layer["qk_dim"] == 4]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        file = narrow[0].path / name
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: len(lines) // 2]))
    table, paths = report(narrow, tmp_path / "report")
    assert all(path.exists() for path in paths)
    assert len(table) == 6


def test_two_learning_rates_of_one_variant_are_told(tmp_path: Path) -> None:
    """Its mean over seeds would be of neither."""
    runs = [
        made_up(tmp_path / str(rate), name, seed, 1.0, accuracy=0.9, learning_rate=rate, **TASK)
        for name, seed, rate in (("softmax", 0, 1e-3), ("taylor:1", 0, 2e-3), ("softmax", 1, 2e-3))
    ]
    with pytest.raises(ValueError, match="cannot be compared: learning_rate"):
        results(runs[:2])
    for folder in {run.path.parent for run in runs}:  # as a sweep does
        add_to_sweep(folder, {"setting": "learning_rate", "chosen": {}, "trials": []})
    assert len(results(runs[:2])) == 2
    with pytest.raises(ValueError, match="one variant with different values of learning_rate"):
        results(runs)
