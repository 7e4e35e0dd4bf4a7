"""Commands on folders and files after changes by hand: ``train --resume``, ``claims``, --config."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzzing import damaged, mutated, outcome, time_limit
from made_up import made_up
from softmax_rnn.cli.main import main
from softmax_rnn.training import RunConfig, train
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.loop import Loop
from test_fuzz_config import LAUGHS, yaml_texts
from tiny import TINY

OWN = ("config.yaml", "environment.json", "metrics.jsonl", "evaluations.jsonl")


class Stopped(BaseException):
    """What ends a run half-way."""


def _told(words: list[str]) -> tuple[int, str]:
    """The exit code of a command line, and what it says of a mistake."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), time_limit():
        try:
            code = main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, told.getvalue()


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunConfig, Path, list[Any]]]:
    """A run that was stopped after its second checkpoint, and the rows of an undisturbed one."""
    folder = tmp_path_factory.mktemp("half")
    (folder / "texts").mkdir()
    for i in range(40):
        words = " ".join(("state", "key", "query")[i * j % 3] for j in range(60))
        (folder / "texts" / f"{i:02}.txt").write_text(words)
    config = RunConfig(**{**TINY, "corpus": str(folder / "texts")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTMAX_RNN_CACHE", str(folder / "cache"))
        rows = _rows(train(config, folder / "whole"))
        step, steps = Loop.gradients, 0

        def stop(*args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 11:
                raise Stopped
            return step(*args, **options)

        with patch.context() as inner:
            inner.setattr(Loop, "gradients", stop)
            with pytest.raises(Stopped):
                train(config, folder / "half")
        yield config, folder / "half", rows


def _rows(folder: RunFolder) -> list[Any]:
    both = [*folder.metrics.to_dict("records"), *folder.evaluations.to_dict("records")]
    return [{key: row[key] for key in row if key != "tokens_per_second"} for row in both]


@st.composite
def _changed(draw: st.DrawFn, folder: Path) -> tuple[str, bytes | None]:
    saved = [
        str(path.relative_to(folder))
        for path in sorted(folder.glob("checkpoint-*/**/*"))
        if path.is_file()
    ]
    name = draw(st.sampled_from(OWN) | st.sampled_from(saved))
    original = (folder / name).read_bytes()
    if draw(st.integers(0, 9)) == 0:
        return name, None
    if name not in OWN or draw(st.integers(0, 3)) == 0:
        return name, draw(damaged(original))
    if name == "config.yaml":
        return name, yaml.safe_dump(draw(mutated(yaml.safe_load(original)))).encode()
    if name == "environment.json":
        return name, json.dumps(draw(mutated(json.loads(original)))).encode()
    rows = draw(mutated([json.loads(line) for line in original.splitlines()]))
    lines = rows if isinstance(rows, list) else [rows]
    return name, "".join(json.dumps(row) + "\n" for row in lines).encode()


@settings(max_examples=6)  # they are slow
@given(data=st.data())
def test_resume(half: tuple[RunConfig, Path, list[Any]], data: Any) -> None:
    config, original, rows = half
    name, content = data.draw(_changed(original))
    path = original.parent / "run"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, path)
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    found = outcome(lambda: train(config, path, resume=True), names=str(path))
    assert not [file for file in path.iterdir() if file.name.startswith(".")]
    if found.error is None:  # a checkpoint holds the rows so far, and an older one does as well
        assert _rows(found.value) == rows


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "test_losses.npy"])
def test_claims(tmp_path: Path, name: str) -> None:
    for variant in ("softmax", "norm", "gate"):
        made_up(tmp_path / "demo" / "base-stdlib", variant, 0, 1.5)
    assert _told(["claims", str(tmp_path)]) == (0, "")
    file = tmp_path / "demo" / "base-stdlib" / "softmax-0" / name
    for content in (b"", b"\xff", b"null\n", b"[" * 100_000):
        file.write_bytes(content)
        code, told = _told(["claims", str(tmp_path)])
        assert code == 2
        assert str(file) in told


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("softmax_rnn.training.train", _stop)
        yield tmp_path_factory.mktemp("config")


def _stop(*_: Any, **__: Any) -> None:
    raise OverflowError("as far as this")


@settings(max_examples=6)  # they are slow
@given(yaml_texts)
@example(b"attention: " + b"[" * 20_000)
@example(b"seed: !!bool x\n")
@example(LAUGHS.encode())
def test_config_files(place: Path, text: bytes) -> None:
    path = place / "config.yaml"
    path.write_bytes(text)
    code, told = _told(["train", "--config", str(path)])
    assert code in (1, 2)
    assert told.startswith("error: ")
    assert code == 2 or told == "error: OverflowError: as far as this\n"


@pytest.mark.parametrize("word", ["steps=[", "steps=!!bool x", "a=*b", "seed=1", "variant=gate"])
def test_settings_as_words(word: str) -> None:
    code, told = _told(["reproduce", "figure4", "--dry-run", "--with", word])
    assert code == 2
    assert told.startswith("error: ")


def test_a_path_is_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_up(tmp_path / "[", "softmax", 0, 1.5)  # so that its path holds "[/softmax"
    summary = json.loads((run.path / "summary.json").read_text())
    (run.path / "summary.json").write_text(json.dumps({**summary, "steps": 1}))
    monkeypatch.setattr(
        "softmax_rnn.training.train", lambda *_, **__: RunFolder(tmp_path / "[/b]" / "..")
    )
    (tmp_path / "[").mkdir(exist_ok=True)
    folder = tmp_path / "[" / "b]"
    shutil.copytree(run.path, folder)
    monkeypatch.setattr("softmax_rnn.training.train", lambda *_, **__: RunFolder(folder))
    assert _told(["train", "--out", str(folder)]) == (0, "")
