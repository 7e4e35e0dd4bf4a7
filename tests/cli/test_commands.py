"""The commands from end to end: what they write, and what they print."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import softmax_rnn.data.preparation as preparation
import softmax_rnn.data.tokenise as tokenise
from made_up import made_up
from softmax_rnn.cli.main import main
from softmax_rnn.data import prepare
from softmax_rnn.data.shards import Journal
from softmax_rnn.experiments import scheduler
from softmax_rnn.experiments.claims import OWN, PAPER
from tiny import TINY, options


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


def test_train_then_generate_then_analyze(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "--attention", "taylor:2", *options(texts, out)]) == 0
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", "state ", "--max-new-tokens", "5"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("state ")
    assert "cache: recurrent; recurrent cache" in shown
    assert main(["analyze", str(out), "--blocks", "2", "--order", "3"]) == 0
    shown = capsys.readouterr().out
    assert "order by bound" in shown
    for name in ("analysis.png", "analysis.svg", "analysis_heads.csv", "analysis_powers.csv"):
        assert (out / name).stat().st_size > 0


def test_prepare(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", str(texts), "--test-fraction", "0.2", "--workers", "1"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "tokens, SHA-256" in first
    assert main([*command, "--verify"]) == 0
    assert capsys.readouterr().out == first
    (shard,) = Path(first.split("\n")[-2].strip()).glob("test-*.bin")
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert main([*command, "--verify"]) == 2
    assert shard.name in capsys.readouterr().err


def test_prepare_is_stopped(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "softmax_rnn.training.run.load_corpus", lambda *_, **__: signal.raise_signal(15)
    )
    assert main(["prepare", str(texts)]) == 75
    assert capsys.readouterr().err == "Stopped by SIGTERM; rerun the same command to resume\n"


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_prepare_stopped_before_its_first_shard_starts_again(
    command: str,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = {
        "prepare": ["prepare", str(texts)],
        "train": ["train", "--corpus", str(texts), "--out", str(tmp_path / "run")],
    }[command]
    monkeypatch.setattr(preparation, "encode_all", lambda *_: signal.raise_signal(15))
    assert main(words) == 75
    told = "no part of the corpus was kept: rerun the same command to start again\n"
    assert capsys.readouterr().err.endswith(f"Stopped by SIGTERM; {told}")


def test_prepare_stopped_after_a_shard_can_be_resumed(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(prepare.__kwdefaults__, "shard_tokens", 500)
    monkeypatch.setattr(preparation, "_SMALL", 1000)
    monkeypatch.setattr(tokenise, "_CHARACTERS", 1000)
    before = Journal.commit

    def commit(self: Journal, **record: object) -> None:
        before(self, **record)
        signal.raise_signal(15)

    monkeypatch.setattr(Journal, "commit", commit)
    assert main(["prepare", str(texts)]) == 75
    told = "Stopped by SIGTERM; rerun the same command to resume\n"
    assert capsys.readouterr().err.endswith(told)


def test_reproduce_dry_run_and_claims(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["reproduce", "figure2", "--scale", "paper", "--dry-run"]) == 0
    assert "A100-80GB" in (shown := capsys.readouterr().out).splitlines()[0]
    assert " h " not in shown
    there = ["reproduce", "figure2", "--scale", "paper", "--dry-run", "--gpu", "A100-80GB"]
    assert main(there) == 0
    shown = capsys.readouterr().out
    assert shown.count("275.3 M") == 6
    assert "36 x 1024" in shown
    assert shown.count("13 h") == 9
    assert "9 to run" in shown
    fields = [f"{key}={value}" for key, value in {**TINY, "corpus": texts}.items()]
    for attention in ("softmax", "norm"):
        where = tmp_path / "demo" / "base-stdlib" / f"{attention}-seed0"
        assert main(["train", "--attention", attention, *options(texts, where)]) == 0
    capsys.readouterr()
    assert main(["claims", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1. Norm's loss equals softmax's." in shown
    assert "norm equal to softmax within 0.03" in shown
    claims = json.loads((tmp_path / "demo" / "claims.json").read_text())
    sources = [(row["source"], row["claim"]) for row in claims]
    assert {number for source, number in sources if source == PAPER} == set(range(1, 12))
    assert {number for source, number in sources if source == OWN} == set(range(1, 13))
    there = ["reproduce", "figure2", "--out", str(tmp_path), "--dry-run", "--with", *fields]
    assert main(there) == 0
    assert capsys.readouterr().out.count("finished") == 2


def test_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["variants"]) == 0
    shown = capsys.readouterr().out
    assert "denominator=none, norm=l2" in shown
    assert "softmax_l2" in shown
    assert "Defaults: feature_map=identity, series=exp" in shown
    assert "taylor:2" in shown
    assert "layer: qk_dim=16" in shown  # of based


def test_what_finished_is_reported_where_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(tmp_path, "softmax", 0, 1.5).path.rename(tmp_path / "softmax-seed0")

    def fail(*_: object, **__: object) -> None:
        raise scheduler.RunsFailedError("1 of 2 runs did not finish.")

    monkeypatch.setattr(scheduler, "run_all", fail)
    assert main(["compare", "softmax", "norm", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.err == "error: 1 of 2 runs did not finish.\n"
    assert str(tmp_path / "results.csv") in told.out


def test_names_are_not_interpreted_as_markup(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "br[/b]x$\\frac$"
    assert main(["compare", "softmax", *options(texts, out)]) == 0
    assert "in " in capsys.readouterr().out
    assert main(["analyze", str(out / "softmax-seed0"), "--blocks", "1", "--order", "2"]) == 0
    run = tmp_path / "run$\\frac$"
    (out / "softmax-seed0").rename(run)
    assert main(["analyze", str(run), "--blocks", "1", "--order", "2"]) == 0
