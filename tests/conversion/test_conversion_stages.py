"""The command convert: its stages, what stops them, and its report."""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import softmax_rnn.conversion.plan as conversion_plan
import softmax_rnn.conversion.report as conversion_report
import softmax_rnn.conversion.stages as conversion
from processes import ended, kill, start
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.analysis.evaluation import evaluate
from softmax_rnn.cli.main import main
from softmax_rnn.conversion.heads import state_off
from softmax_rnn.conversion.layer import substituted
from softmax_rnn.conversion.stages import Conversion
from softmax_rnn.conversion.trainable import conversion_model, converted_source
from softmax_rnn.training.config import ConversionConfig
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.loop import Loop
from softmax_rnn.training.opening import open_model
from sources import save_source
from test_together import pair

BOTH = ("block_size=32", "test_fraction=0.2", "steps=8", "evaluate_every=4", "save_every=2")
STAGES = ("fit", "transfer", "finetune", "controls", "report")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(" ".join(str(i * j * j) for j in range(60)) + "\n")
    return folder


def words(source: Path, corpus: Path, out: Path, *more: str) -> list[str]:
    given = ["--attention", "lolcats:8", "--corpus", str(corpus), "--out", str(out)]
    return ["convert", str(source), *given, "--with", *BOTH, "log_every=2", *more]


@pytest.fixture(scope="module")
def calm(source: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished conversion."""
    root = tmp_path_factory.mktemp("calm")
    assert main(words(source, corpus, root / "out")) == ExitCode.FINISHED
    return root / "out"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return open_model(str(folder)).model.state_dict()


def assert_same_weights(here: Path, there: Path) -> None:
    found, expected = weights(here), weights(there)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_conversion_from_nothing_to_a_report(calm: Path) -> None:
    names = {path.name for path in calm.iterdir()}
    assert {"conversion.yaml", "fitted", "transfer", "finetune", "model"} <= names
    found = json.loads((calm / "conversion.json").read_text())
    parts = ("", ", state off", ", window off")
    wanted = [
        *("source", "source, trained", "window, trained"),
        *(f"fitted{x}" for x in parts),
        "transfer",
        *(f"finetune{x}" for x in parts),
    ]
    assert [row["model"] for row in found["losses"]] == wanted
    losses = {row["model"]: row["loss"] for row in found["losses"]}
    assert losses["source, trained"] < losses["source"]
    for row in found["losses"]:
        own = row["loss"] - losses["source, trained"]
        assert row["difference_trained"] == pytest.approx(own, abs=1e-6)
        assert row["low_trained"] <= row["difference_trained"] <= row["high_trained"]
    brings = found["state_brings"]["difference"]
    assert brings == pytest.approx(losses["window, trained"] - losses["finetune"], abs=1e-6)
    for name in ("source", "window"):
        summary = RunFolder(calm / "controls" / name).summary
        assert summary["tokens"] == RunFolder(calm / "finetune").summary["tokens"]
    heads = pd.read_csv(calm / "heads.csv")
    assert len(heads) == 3 * 2 * 4
    assert heads.state_share.between(0, 1).all()
    for name in ("conversion.png", "conversion.svg", "conversion.md"):
        assert (calm / name).stat().st_size > 500
    card = ModelCard.load(calm / "model" / "README.md")
    assert card.data.to_dict()["pipeline_tag"] == "text-generation"
    assert "in blocks of 32 tokens" in card.content
    assert f"{losses['source, trained']:.4f}" in card.content
    assert "transfer: 8 steps" in card.content
    assert len(found["samples"]["source"]) == len(found["samples"]["finetune"]) == 3


def test_the_result_is_a_model_by_itself(calm: Path, tmp_path: Path) -> None:
    assert_same_weights(calm / "model", calm / "finetune")
    model = AutoModelForCausalLM.from_pretrained(calm / "model")
    ids = torch.arange(40)[None]
    out = model.generate(ids, max_new_tokens=5, do_sample=False)
    plain = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(out, plain)


def killing(where: str, *, folder: str = "", calls: int = 1) -> Callable[[], None]:
    """Kill the process when a function is called for the so-manieth time (in a run's folder)."""
    return functools.partial(_patch, where, folder, calls)


def _patch(where: str, folder: str, calls: int) -> None:
    place, _, name = where.rpartition(".")
    owner = pkgutil.resolve_name(f"softmax_rnn.{place}")
    original, seen = getattr(owner, name), 0

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += not folder or args[0].folder.path.name == folder
        if seen == calls:
            kill()
        return original(*args, **kwargs)

    setattr(owner, name, function)


@pytest.mark.parametrize("attention", ["lolcats:8", "window_state:8", "taylor:2", "window:8"])
def test_controls_before_training(attention: str, source: Path, corpus: Path) -> None:
    """They are the source, and the converted model with its state off."""
    given = Conversion.of(str(source), Path("out"), attention, str(corpus), **_settings(steps=2))
    controls = given.controls
    both = attention in ("lolcats:8", "window_state:8")
    assert list(controls) == ["source, trained", *(["window, trained"] if both else [])]
    ids = torch.arange(40)[None]
    plain = open_model(str(source)).model

    def logits(config: ConversionConfig) -> torch.Tensor:
        assert config.objective == "language"
        assert config.tokens_per_step == given.finetune.tokens_per_step
        assert config.steps == given.finetune.steps
        return conversion_model(open_model(str(source)).model, config)[0].eval()(ids).logits

    expected = plain(ids).logits
    torch.testing.assert_close(logits(controls["source, trained"]), expected, rtol=1e-4, atol=1e-4)
    if both:
        model, _ = converted_source(plain, given.transfer)
        with substituted(model, state_off):
            expected = model(ids, use_cache=False).logits
        found = logits(controls["window, trained"])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_softmax_is_no_conversion(source: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match="leaves nothing to convert: it is softmax"):
        Conversion.of(str(source), Path("out"), "softmax", str(corpus), **_settings(steps=2))


KILLS = {
    "fit": killing("conversion.stages.seal"),
    "transfer": killing("training.loop.Loop.gradients", folder="transfer", calls=6),
    "finetune": killing("training.loop.Loop.gradients", folder="finetune", calls=6),
    "result": killing("conversion.stages.shutil.copyfile"),
    "controls": killing("training.loop.Loop.gradients", folder="window", calls=6),
    "report": killing("conversion.report._draw"),
}


@pytest.mark.slow
def test_a_conversion_killed_in_each_stage_goes_on_to_the_same_weights(
    source: Path, corpus: Path, calm: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    for name, befalls in KILLS.items():
        code = ended(start(words(source, corpus, out), log, before=befalls))
        assert code == -signal.SIGKILL, (name, log.read_text())
    assert ended(start(words(source, corpus, out), log)) == ExitCode.FINISHED, log.read_text()
    for stage in ("fitted", "transfer", "finetune", "model"):
        assert_same_weights(out / stage, calm / stage)
    ours, theirs = (json.loads((x / "conversion.json").read_text()) for x in (out, calm))
    assert ours["losses"] == theirs["losses"]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_a_signal_stops_a_conversion(source: Path, corpus: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(words(source, corpus, out), log, before=_terminated)
    assert ended(process) == ExitCode.STOPPED, log.read_text()
    assert "rerun the same command to resume" in log.read_text()
    assert [path.name for path in (out / "transfer").glob("checkpoint-*")] == ["checkpoint-5"]


def _terminated() -> None:
    original = Loop.gradients

    def gradients(loop: Loop) -> float:
        if loop.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(loop)

    Loop.gradients = gradients  # type: ignore[method-assign]


STOPS = {
    "scores": "analysis.heads.terms.LayerTerms.add",
    "fit": "conversion.initial_values.relative_errors",
    "losses": "analysis.evaluation.token_losses",
    "heads": "conversion.heads.relative_errors",
    "decoding": "conversion.measures.cache_bytes",
}


@pytest.mark.slow
def test_a_signal_stops_within_a_batch_of_any_stage(
    source: Path,
    corpus: Path,
    calm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What follows the signal is not computed, and the same command then goes on to the end."""
    out, seen = tmp_path / "out", dict.fromkeys(STOPS, 0)
    for name, where in STOPS.items():
        place, _, function = where.rpartition(".")
        owner = pkgutil.resolve_name(f"softmax_rnn.{place}")
        original = getattr(owner, function)

        def stopping(
            *args: Any, _name: str = name, _original: Any = original, **kwargs: Any
        ) -> Any:
            seen[_name] += 1
            if seen[_name] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return _original(*args, **kwargs)

        monkeypatch.setattr(owner, function, stopping)
        assert main(words(source, corpus, out)) == ExitCode.STOPPED
        assert "rerun the same command to resume" in capsys.readouterr().err
        assert seen[name] == 2
        monkeypatch.setattr(owner, function, original)
    assert main(words(source, corpus, out)) == ExitCode.FINISHED
    assert_same_weights(out / "model", calm / "model")
    ours, theirs = (json.loads((x / "conversion.json").read_text()) for x in (out, calm))
    assert ours["losses"] == theirs["losses"]


def test_scores_are_measured_once(
    source: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage fit that was stopped after them goes on from there, unless its text is another."""
    given = functools.partial(Conversion.of, str(source), tmp_path, "lolcats:8", str(corpus))
    measured, original = [], conversion.measured_scores

    def counted(*args: Any) -> Any:
        measured.append(1)
        return original(*args)

    monkeypatch.setattr(conversion, "measured_scores", counted)
    monkeypatch.setattr(conversion, "fit_initial_values", lambda *_: 1 / 0)
    for seed, times in ((0, 1), (0, 1), (1, 2), (1, 2)):
        with pytest.raises(ZeroDivisionError):
            given(**_settings(seed=seed)).execute(["fit"])
        assert len(measured) == times


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would want two GPUs")
def test_two_processes_train_the_stages_one_at_a_time(
    source: Path, corpus: Path, calm: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    one = [*words(source, corpus, out), "--stages"]
    assert ended(start([*one, "fit"], log)) == ExitCode.FINISHED, log.read_text()
    for stage in ("transfer", "finetune"):
        assert pair([*one, stage], log) == [ExitCode.FINISHED] * 2, log.read_text()
    found, expected = weights(out / "model"), weights(calm / "model")
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=1e-4, msg=name)


def test_only_some_stages(source: Path, corpus: Path, tmp_path: Path) -> None:
    given = Conversion.of(str(source), tmp_path, "lolcats:8", str(corpus), **_settings())
    with pytest.raises(ValueError, match="There is no .*fitted: run the stage 'fit' first"):
        given.execute(["transfer"])
    given.execute(["fit"])
    with pytest.raises(ValueError, match="run the stage 'transfer' first"):
        given.execute(["finetune"])
    with pytest.raises(ValueError, match="Did you mean 'finetune'"):
        given.execute(["fintune"])


def test_a_folder_holds_one_conversion(source: Path, corpus: Path, tmp_path: Path) -> None:
    Conversion.of(str(source), tmp_path, "lolcats:8", str(corpus), **_settings()).execute(["fit"])
    other = Conversion.of(str(source), tmp_path, "lolcats:4", str(corpus), **_settings())
    with pytest.raises(ValueError, match=r"other settings of transfer \(attention: 'lolcats:8'"):
        other.execute(["fit"])


def test_an_attention_without_parameters_has_no_transfer(
    source: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Conversion.of(str(source), tmp_path, "window:8", str(corpus), **_settings(steps=2))
    given.execute(STAGES)
    assert "the stage transfer is skipped" in capsys.readouterr().err
    assert list(given.models) == ["source", "source, trained", "fitted", "finetune"]
    conversion_report.report(given.models, given.finetune, tmp_path)
    assert (tmp_path / "conversion.md").exists()


def _settings(**fields: Any) -> dict[str, Any]:
    both = {"block_size": 32, "test_fraction": 0.2, "log_every": 2, "evaluate_every": 2}
    return {"fields": {**both, "save_every": 2}, "transfer": fields, "finetune": fields}


def test_an_attention_from_a_file(source: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("variant: lolcats\nwindow: 4\n")
    given = Conversion.of(
        str(source), tmp_path, str(tmp_path / "mine.yaml"), str(corpus), **_settings()
    )
    assert given.transfer.spec.window == given.finetune.spec.window == 4
    assert given.transfer.variant.options.feature_map == "hedgehog"


def test_settings_bind_from_the_first_result_on(source: Path, corpus: Path, tmp_path: Path) -> None:
    for size, message in ((512, "block_size=512 is longer than the 128 tokens"), (32, "")):
        settings = {**_settings(), "fields": {**_settings()["fields"], "block_size": size}}
        given = Conversion.of(str(source), tmp_path, "lolcats:8", str(corpus), **settings)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            given.execute(["fit"])


def test_settings_of_an_earlier_version_are_known(tmp_path: Path) -> None:
    given = Conversion.of("a", tmp_path, "lolcats:8", "b", **_settings())
    given._check_settings()
    given.fitted.mkdir()
    file = tmp_path / "conversion.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(x for x in lines if "encoding" not in x and "bad_files" not in x))
    given._check_settings()
    with pytest.raises(ValueError, match="other settings of transfer .encoding: 'utf-8' there"):
        Conversion.of(
            "a", tmp_path, "lolcats:8", "b", **_settings(encoding="latin-1")
        )._check_settings()
    for wrong in ("[]", "a: 1", "transfer: 3\nfinetune: 3", "transfer: {stps: 3}"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="is not what a conversion has written"):
            given._check_settings()


def test_the_result_knows_its_text(calm: Path) -> None:
    found, expected = (evaluate(open_model(str(calm / name))) for name in ("model", "finetune"))
    assert found.summary() == expected.summary()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "1-2"], "has the layers 0 to 1, not"),
        (["--with", "block_size=256"], "longer than the 128 tokens"),
        (["--with", "block_size=8"], "sees all 8 tokens of a block"),
    ],
)
def test_a_dry_run_refuses_what_cannot_run(
    source: Path,
    corpus: Path,
    tmp_path: Path,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words(source, corpus, tmp_path / "out")[: -len(BOTH) - 2]
    assert main([*given, "--dry_run", *more]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err


def test_a_changed_source_is_noticed(corpus: Path, tmp_path: Path) -> None:
    source = save_source(tmp_path / "llama")
    settings = _settings(steps=2)
    given = Conversion.of(str(source), tmp_path / "out", "lolcats:8", str(corpus), **settings)
    given.execute(STAGES)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(source)
    with pytest.raises(ValueError, match="have changed since it was converted"):
        conversion_report.report(given.models, given.finetune, given.out, given.source_hash)
    shutil.rmtree(given.fitted)
    with pytest.raises(ValueError, match="its weights have changed"):
        given.execute(STAGES)


@pytest.mark.parametrize("here", [True, False])
def test_costs_are_told_ahead(
    here: bool,
    source: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(conversion_plan, "_SECONDS", 0.0)
    if not here:
        monkeypatch.setattr(conversion_plan, "at_hand", lambda source: False)
    assert main(words(source, corpus, tmp_path / "out", "--dry_run")) == ExitCode.FINISHED
    told = capsys.readouterr().out
    assert all(stage in told for stage in STAGES)
    assert "FLOPs" in told
    assert ("estimated from the first batches" in told) == here
    assert told.count("not known") == (0 if here else 6)
    assert "A100" not in told
    assert not (tmp_path / "out").exists()


def test_the_time_of_work_follows_from_its_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(conversion_plan.time, "perf_counter", lambda: now[0])

    def work(progress: Callable[[float], None]) -> None:
        now[0] += 5.0  # of the first batch, which is slow
        for number in range(1, 101):
            now[0] += 2.0
            progress(number / 100)

    assert conversion_plan.expected_seconds(work, 20.0) == pytest.approx(205.0)
    assert now[0] < 40.0
    assert conversion_plan.expected_seconds(work, 1e9) == pytest.approx(205.0)
