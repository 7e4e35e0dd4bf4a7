"""Folders of finished runs after changes: reported on as they are, or a file is named."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzzing import damaged, mutated, outcome, snapshot
from made_up import made_up
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.verdicts import judge, verdict_table
from softmax_rnn.report.check import check_run
from softmax_rnn.report.outputs import find_runs, report
from softmax_rnn.report.table import by_variant, require_comparable
from softmax_rnn.training.folder import RunFolder

FILES = (
    *("config.yaml", "environment.json", "summary.json", "test_losses.npy", "test_errors.npy"),
    *("metrics.jsonl", "evaluations.jsonl"),
)
TASK = {"corpus": "task:mqar", "block_size": 64, "stop_at_accuracy": 0.99}
WRITTEN = {"results.csv", "figure.png", "figure.svg", "report.html"}


class Trap:
    """An object whose pickle leaves a folder behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two variants of two seeds on a task.

    What is slow in drawing and changes nothing is left out.
    """
    root = tmp_path_factory.mktemp("runs")
    for variant in ("softmax", "taylor:2"):
        for seed in (0, 1):
            made_up(root / "whole", variant, seed, 1.5, accuracy=0.9, **TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("softmax_rnn.report.html.get_plotlyjs", str)
        yield root


def _array(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


_ARRAYS = st.sampled_from(
    [
        *(np.zeros(0), np.zeros(()), np.zeros((3, 10)), np.ones(29), np.ones(30, np.float32)),
        *(np.ones(30, int), np.full(30, np.nan), np.full(30, np.inf), -np.ones(30)),
        *(np.array(["a"] * 30), np.ones(30, complex), np.ones(30, "datetime64[s]")),
        np.zeros(30, [("a", float)]),
    ]
)


@st.composite
def _changed(draw: st.DrawFn, name: str, original: bytes, trap: Path) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged(original))
    if name == "config.yaml":
        data = draw(mutated(yaml.safe_load(original)))
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=False).encode()
    if name.endswith(".npy"):
        if draw(st.integers(0, 5)) == 0:
            return _array(np.array([Trap(trap)] * 30), allow_pickle=True)
        return _array(draw(_ARRAYS))
    if name.endswith(".json"):
        return json.dumps(draw(mutated(json.loads(original)))).encode()
    rows = [json.loads(line) for line in original.splitlines()]
    changed = draw(mutated(rows))
    lines = changed if isinstance(changed, list) else [changed]
    return "".join(json.dumps(row) + "\n" for row in lines).encode()


@st.composite
def _damages(draw: st.DrawFn, whole: Path) -> tuple[str, bytes | None]:
    run = draw(st.sampled_from(sorted(path.name for path in whole.iterdir())))
    name = draw(st.sampled_from(FILES))
    file = whole / run / name
    if draw(st.integers(0, 9)) == 0:
        return f"{run}/{name}", None
    return f"{run}/{name}", draw(_changed(name, file.read_bytes(), whole.parent / "trap"))


def _verdicts(root: Path) -> list[dict[str, Any]]:
    """What ``claims`` writes: a verdict on the runs of one condition."""
    found = find_runs(root)
    require_comparable(found)
    return verdict_table(judge({("recall", "mqar-width4"): by_variant(found)}, SCALES["demo"]))


@settings(max_examples=12)  # they are slow
@given(data=st.data())
def test_runs(runs: Path, data: Any) -> None:
    file, content = data.draw(_damages(runs / "whole"))
    root = runs / "damaged"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(runs / "whole", root)
    (root / file).unlink()
    if content is not None:
        (root / file).write_bytes(content)
    before = snapshot(root)
    verdicts = outcome(lambda: _verdicts(root), names=str(root))
    if verdicts.error is None:
        json.dumps(verdicts.value, allow_nan=False)
    assert snapshot(root) == before
    found = outcome(lambda: report(find_runs(root), root), names=str(root))
    assert not (runs / "trap").exists()
    new = {name for name, content in snapshot(root).items() if before.get(name, ...) != content}
    if found.error is not None:
        assert new == set()
        return
    assert new == WRITTEN
    table, _ = found.value
    assert np.isfinite(table.test_loss).all()
    assert (root / "report.html").read_text(encoding="utf-8").count("<details") >= 3


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_named(runs: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(runs / "whole" / "taylor:2-0", tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    check_run(run)
    for content in (b"", b"\xff", b"[" * 100_000, b"null\n", b'{"a": 1}\n', pickle.dumps({})):
        (run.path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            check_run(RunFolder(run.path))
    (run.path / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        check_run(RunFolder(run.path))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("summary.json", {"test_accuracy": None}, "summary.json: test_accuracy"),
        ("summary.json", {"test_accuracy": 1.5}, "test_accuracy must be less than or equal to 1"),
        ("evaluations.jsonl", {"test_accuracy": -0.1}, "test_accuracy must be greater than"),
    ],
)
def test_an_accuracy_is_a_share(
    runs: Path, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(runs / "whole" / "softmax-0", tmp_path / "run")
    file = tmp_path / "run" / name
    row = {**json.loads(file.read_text().split("\n")[-2 if name[0] == "e" else 0]), **change}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        check_run(RunFolder(file.parent))


def test_a_task_has_accuracies_and_a_text_need_not(runs: Path, tmp_path: Path) -> None:
    """Runs of earlier versions have none."""
    made_up(tmp_path, "norm", 0, 1.5)
    check_run(RunFolder(tmp_path / "norm-0"))
    shutil.copytree(runs / "whole" / "softmax-0", tmp_path / "run")
    np.save(tmp_path / "run" / "test_errors.npy", np.ones(29))
    with pytest.raises(ValueError, match=r"has 29 test blocks, test_losses.npy 30"):
        check_run(RunFolder(tmp_path / "run"))
    (tmp_path / "run" / "test_errors.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_errors.npy"):
        check_run(RunFolder(tmp_path / "run"))


HOSTILE = "<script>alert(1)</script>"


@pytest.mark.parametrize(
    "name",
    [HOSTILE.replace("/", "\u2215"), "javascript:alert(1)", '"onclick=x', "a\nb", "%41#?", "[/b]"],
)
def test_names_of_folders_are_words(runs: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(runs / "whole" / "taylor:2-0", tmp_path / name / name)
    environment = tmp_path / name / name / "environment.json"
    data = {**json.loads(environment.read_text()), HOSTILE: [HOSTILE, "\ud800\0"]}
    environment.write_text(json.dumps(data))
    report(find_runs(tmp_path), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "javascript:alert" not in page.split("<h3>Runs</h3>")[1].split("</a>")[0].split(">")[2]
    assert '"onclick' not in page
