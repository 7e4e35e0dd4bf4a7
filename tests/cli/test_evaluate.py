"""The command ``evaluate``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from softmax_rnn.cli.main import main
from softmax_rnn.training import train
from tiny import tiny

GUIDE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")


def test_evaluate_a_run(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tiny(texts, attention="norm", steps=2, evaluate_every=2), tmp_path / "run")
    assert main(["evaluate", str(run.path)]) == 0
    shown = capsys.readouterr().out
    for word in ("bits per byte", "tokens before", "blocks of the test split", "evaluation.json"):
        assert word in shown
    written = json.loads((run.path / "evaluation.json").read_text())
    assert written["corpus"]["loss"] == pytest.approx(run.summary["test_loss"], abs=1e-6)
    assert written["model"] == str(run.path)
    assert "torch" in written["environment"]["packages"]
    out = tmp_path / "out"
    words = ["--blocks", "2", "--block-size", "16", "--batch-size", "1", "--out", str(out)]
    assert main(["evaluate", str(run.checkpoints[-1]), *words]) == 0
    again = json.loads((out / "evaluation.json").read_text())["corpus"]
    assert (again["rows"], again["block_size"], again["tokens"]) == (2, 16, 30)
    first = (out / "evaluation.json").read_bytes()
    assert main(["evaluate", str(run.checkpoints[-1]), *words]) == 0
    assert (out / "evaluation.json").read_bytes() == first  # earlier results stay
    assert json.loads((out / "evaluation-2.json").read_text())["corpus"] == again
    capsys.readouterr()
    assert main(["evaluate", str(run.path), "--blocks", "0"]) == 2
    assert "blocks must be an integer >= 1, not 0" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "nowhere")]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_the_guide(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The task and the Python of docs/evaluate.md, with a tiny run."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval", reason="the extra 'evaluate' is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    train(tiny(texts, attention="taylor:2", steps=2, evaluate_every=2), Path("runs/norm"))
    Path("tasks").mkdir()
    for path, text in re.findall(r"cat > (\S+) <<'END'\n(.*?)END\n", GUIDE, flags=re.S):
        Path(path).write_text(text)
    capsys.readouterr()
    command = "evaluate runs/norm --include-path tasks --tasks colours"
    assert f"\nsoftmax-rnn {command}\n" in GUIDE
    assert main(command.split()) == 0
    assert re.search(r"colours +acc +none +\d\.\d{4}", capsys.readouterr().out)
    written = json.loads(Path("runs/norm/evaluation.json").read_text())
    assert "corpus" not in written
    assert [(row["task"], row["questions"]) for row in written["tasks"]] == [("colours", 3)]
    exec("\n".join(re.findall(r"```python\n(.*?)```", GUIDE, flags=re.S)), {})
    assert float(capsys.readouterr().out.split()[-1]) == written["tasks"][0]["value"]
