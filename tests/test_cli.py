"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from softmax_rnn.cli import main
from tiny import TINY


def options(texts: Path, out: Path, **fields: object) -> list[str]:
    merged = {**TINY, "steps": 4, "corpus": texts, "out": out, **fields}
    return [word for key, value in merged.items() for word in (f"--{key}", str(value))]


def test_compare_from_nothing_to_a_report(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    arguments = ["compare", "softmax", "taylor:2", *options(texts, out)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "minus softmax" in shown
    for name in ("results.csv", "figure.png", "figure.svg", "report.html"):
        assert (out / name).stat().st_size > 0
    before = (out / "softmax-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (out / "softmax-seed0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert main(["report", str(out)]) == 0


def test_train(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--attention", "norm", *options(texts, tmp_path / "run")]
    assert main([word.replace("block_size", "block-size") for word in arguments]) == 0
    assert "test loss" in capsys.readouterr().out
    config = tmp_path / "run" / "config.yaml"
    again = ["train", "--config", str(config), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    assert (tmp_path / "again" / "config.yaml").read_text() == config.read_text()


def test_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["variants"]) == 0
    assert "denominator=none, norm=l2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nrom"], "Did you mean 'norm'?"),
        (["compare", "--preset", "dmo"], "Unknown preset 'dmo'. Did you mean 'demo'?"),
        (["compare", "--stepz", "3"], "Did you mean 'steps'?"),
        (["train", "--steps", "many"], "Got value: many"),
        (["train", "--num-heads", "3"], "num_heads=3 must divide"),
        (["train", "--corpus", "no/such/*.txt"], "No file matches the corpus 'no/such/*.txt'"),
        (["train", "--config", "no_such.yaml"], "no_such.yaml"),
        (["report", "no/such"], "No finished run in no/such"),
        (["trian"], "Did you mean 'train'?"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    told = capsys.readouterr().err
    assert code == 2
    assert message in told
    assert "Traceback" not in told
    assert len(told.splitlines()) <= 4


def test_an_unknown_key_of_a_config_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("learning_rat: 0.1\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(tmp_path / "config.yaml")])
    assert "Did you mean 'learning_rate'?" in capsys.readouterr().err
