"""Runs side by side."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from softmax_rnn.experiments.compare import RunsFailedError, compare_configs, run_all
from tiny import tiny


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_runs_differ_in_their_attention_alone(texts: Path, tmp_path: Path) -> None:
    runs = compare_configs(["softmax", "taylor:4"], [0, 5], tiny(texts), tmp_path)
    assert [run.name for run in runs] == [
        "softmax-seed0",
        "taylor-4-seed0",
        "softmax-seed5",
        "taylor-4-seed5",
    ]
    for run in runs:
        fields = run.config.to_dict() | {"attention": "softmax", "seed": 0}
        assert fields == tiny(texts).to_dict()


def test_mistakes_are_named_before_anything_runs(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'norm'"):
        compare_configs(["softmax", "nrom"], [0], tiny(texts), tmp_path)
    with pytest.raises(ValueError, match="named twice"):
        compare_configs(["norm", "norm"], [0], tiny(texts), tmp_path)


def test_runs_are_run_once_and_failures_told(texts: Path, tmp_path: Path, console: Console) -> None:
    root = tmp_path / "runs"
    good = compare_configs(["softmax"], [0], tiny(texts, steps=4), root)
    bad = compare_configs(["norm"], [0], tiny(texts, vocab_size=100, steps=4), root)
    with pytest.raises(RunsFailedError, match="(?s)1 of 2 runs .*norm-seed0.*has 257 ids"):
        run_all([*good, *bad], root, parallel=2, console=console)
    assert good[0].folder.finished
    assert not bad[0].folder.finished
    before = good[0].folder.metrics_file.stat().st_mtime_ns
    run_all(good, root, console=console)
    assert good[0].folder.metrics_file.stat().st_mtime_ns == before
    other = compare_configs(["softmax"], [0], tiny(texts, steps=8), root)
    with pytest.raises(ValueError, match="another configuration .steps: 4 there, 8 now"):
        run_all(other, root, console=console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "softmax-seed0  test loss" in shown
    assert "failed" in shown
