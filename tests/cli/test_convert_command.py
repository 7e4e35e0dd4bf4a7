"""The options of the command convert."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.cli.convert_command import parse_layers
from softmax_rnn.cli.main import main
from sources import save_source


def test_layers_of_a_text() -> None:
    assert parse_layers("0,2,4-7") == ([0, 2, 4, 5, 6, 7], 0)
    assert parse_layers(None) == (None, 0)
    assert parse_layers("auto:8") == (None, 8)
    for text in ("", "auto", "auto:0", "auto:-1", "best:3", "a", "3-", "-3", "1,,2", "4-x"):
        with pytest.raises(ValueError, match="numbers and ranges"):
            parse_layers(text)
    with pytest.raises(ValueError, match="names a layer twice"):
        parse_layers("1,0-2")


def test_a_missing_source_is_told_before_the_first_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--dry_run"]):
        code = main(["convert", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *more])
        told = capsys.readouterr().err
        assert code == ExitCode.WRONG_INPUT
        assert "none" in told
        assert "Stage" not in told
    assert not (tmp_path / "out").exists()


def test_a_missing_package_of_a_later_stage_is_told_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "text.txt").write_text("some text\n" * 999)
    given = ["convert", str(save_source(tmp_path / "llama")), "--out", str(tmp_path / "out")]
    given += ["--corpus", str(tmp_path / "text.txt"), "--with", "test_fraction=0.5"]
    assert main(given) != ExitCode.FINISHED
    told = capsys.readouterr().err
    assert "needs the package 'peft': pip install 'softmax-rnn[convert]'" in told
    assert "Stage" not in told
    # Without LoRA it is not needed: the next error is of the settings.
    assert main([*given, "--finetune", "lora_rank=0"]) == ExitCode.WRONG_INPUT
    assert "block_size=512 is longer than the 128 tokens" in capsys.readouterr().err
