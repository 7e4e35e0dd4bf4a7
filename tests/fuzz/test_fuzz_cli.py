"""Command lines, mistyped in every way: a line that says what is wrong, or what they ask for."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import snapshot, time_limit
from softmax_rnn import training
from softmax_rnn.analysis.heads import analyze
from softmax_rnn.cli import generate
from softmax_rnn.cli.main import main
from softmax_rnn.experiments import scheduler
from softmax_rnn.training import run

LINES = [
    ["train", "--attention", "norm", "--steps", "10", "--seed", "3", "--out", "new"],
    ["train", "--config", "config.yaml", "--resume", "--learning-rate=1e-3"],
    ["train", "--attention", "taylor:4", "--num_heads", "2", "--preset", "small"],
    ["compare", "softmax", "norm", "--seeds", "0", "1", "--parallel", "2"],
    ["prepare", "stdlib", "--max-tokens", "100", "--test_fraction", "0.5"],
    ["reproduce", "figure4", "--dry-run", "--scale", "demo", "--with", "steps=500"],
    ["reproduce", "figure5", "--seeds", "0", "--cluster", "slurm", "--cluster_options", "a=1"],
    ["compare", "mine=spec.yaml", "early=taylor:8", "--cluster", "slurm", "--parallel", "2"],
    ["compare", "softmax", "mine=spec.yaml", "--dry-run", "--gpu", "H200"],
    ["train", "--corpus", "task:mqar?pairs=4", "--stop-at-accuracy", "0.9", "--block-size", "64"],
    ["reproduce", "recall", "--dry-run", "--variants", "softmax", "--with", "block_size=64"],
    ["claims", "nowhere", "--scale", "demo"],
    ["report", "nowhere"],
    ["generate", "nowhere", "--prompt", "a b", "--top-k", "3", "--temperature", "0.5"],
    ["analyze", "nowhere", "--blocks", "2", "--order", "3"],
    ["variants"],
    ["--version"],
    ["train", "--help"],
]
ODD = [
    *("--", "-", "=", "--=", "--config", "--config=-", "--config=.", "--config=config.yaml"),
    *("--steps", "--steps=", "--steps=nan", "--steps=1e400", "-1", "nan", "null", "{}", "[", "é"),
    *("--attention={norm: l2}", "--attention={", "--attention=*a", "--attention.norm=l2", "norm"),
    *("--with", "steps", "a=[", "a=*b", "steps=x", "=5", "steps=", "steps=[1]", "stepz=1", ""),
    *("--help", "--version", "-h", "--print_config", "@config.yaml", "!!python/name:os.system"),
    *("[/b]", "[red]", "--out=[/b]", "--out=", "x" * 5000, "9" * 5000, "0", "taylor:3", "\udcff"),
    *("mine=", "=norm", "norm=gate", "mine=config.yaml", "mine=.", "a/b=norm", "mine=no.yaml"),
    *("--seeds", "--resume", "--resume=maybe", "--compile=7", "--no-such", "--lerning-rate=1"),
    *("task:", "--corpus=task:mqar?", "--with=corpus=task:s6", "--stop-at-accuracy=2", "recall"),
    *("--preset", "--attention", "--seeds=1", "--corpus=\0", "--corpus=[/b]", "--tokenizer=../x"),
]
WORK = (
    *((training, "train"), (run, "load_corpus"), (scheduler, "run_all")),
    *((generate, "generate"), (analyze, "analyze_checkpoint")),
)
WORDS = sorted({word for line in LINES for word in line})


class Reached(BaseException):
    """A command came as far as the work itself."""


def _reached(*args: Any, **options: Any) -> None:
    raise Reached(args, options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to be in, with the work of every command replaced."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "config.yaml").write_text("steps: 20\nattention: gate\n")
    (folder / "spec.yaml").write_text("variant: gate\nclamp: 3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module, name in WORK:  # imported before, so that no module takes a replacement for good
            patch.setattr(module, name, _reached)
        yield folder


@st.composite
def _lines(draw: st.DrawFn) -> list[str]:
    words = list(draw(st.sampled_from(LINES)))
    odd = st.sampled_from(ODD) | st.sampled_from(WORDS) | st.text(max_size=8)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        index = draw(st.integers(0, len(words)))
        action = draw(st.sampled_from(["insert", "replace", "remove", "join", "letter"]))
        if action == "insert" or index == len(words):
            words.insert(index, draw(odd))
        elif action == "replace":
            words[index] = draw(odd)
        elif action == "remove":
            del words[index]
        elif action == "join":
            words[index] += draw(st.sampled_from(["=", ":", " "])) + draw(odd)
        else:
            words[index] = words[index][:-1]
    return words


@given(_lines())
def test_command_lines(place: Path, words: list[str]) -> None:
    before = snapshot(place)
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told), time_limit():
        try:
            code: Any = main(words)
        except SystemExit as stop:
            code = stop.code
        except Reached:
            code = "reached"
    assert code in (0, 1, 2, "reached")
    assert snapshot(place) == before
    if code in (0, "reached"):
        return
    lines = told.getvalue().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines[0]) > len("error: ")
    assert len(lines) <= 12, told.getvalue()
    assert "Traceback" not in told.getvalue()
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
