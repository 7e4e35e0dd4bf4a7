"""compile=auto: what is decided, who remembers it, and that resuming stays exact."""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quick import first_quick
from softmax_rnn.training import compilation, train
from softmax_rnn.training.loop import Loop
from softmax_rnn.training.stopping import RunStopped
from tiny import assert_same_run, tiny


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A fast compiler that counts the graphs it compiles; a cache of its own; no run too short."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(
        nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=backend)
    )
    monkeypatch.setattr(compilation, "SHORTEST", 0.0)
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path / "cache"))
    return graphs


def taking(monkeypatch: pytest.MonkeyPatch, compiled: float, eager: float) -> list[str]:
    """Steps of given times; returns the list of the measured ones."""
    steps: list[str] = []
    real, stance = compilation._seconds, compilation._eager

    class Eager:
        inside = False

        def __enter__(self) -> None:
            Eager.inside, self.own = True, stance()
            self.own.__enter__()

        def __exit__(self, *error: Any) -> None:
            Eager.inside = False
            self.own.__exit__(*error)

    def seconds(loop: Loop) -> float:
        real(loop)
        steps.append("eager" if Eager.inside else "compiled")
        return eager if Eager.inside else compiled

    monkeypatch.setattr(compilation, "_eager", Eager)
    monkeypatch.setattr(compilation, "_seconds", seconds)
    return steps


def decision(folder: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder.path / compilation.FILE).read_text())
    return found


@pytest.mark.parametrize("pays", first_quick([True, False]))
def test_the_faster_way_is_taken_and_remembered(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path, pays: bool
) -> None:
    steps = taking(monkeypatch, compiled=0.5 if pays else 1.5, eager=1.0)
    config = tiny(texts, compile="auto", attention="norm")
    first = train(config, tmp_path / "first")
    assert {*steps} == {"eager", "compiled"}
    assert counted
    found = decision(first)
    assert found["compiled"] is pays
    assert (found["fast"], found["eager"]) == (0.5 if pays else 1.5, 1.0)
    # A run that differs in the seed measures nothing.
    steps.clear()
    other = train(tiny(texts, compile="auto", attention="norm", seed=1), tmp_path / "other")
    assert not steps
    assert decision(other) == found
    # Steps that were measured made no update.
    plain = train(tiny(texts, attention="norm"), tmp_path / "plain")
    losses = [folder.summary["test_loss"] for folder in (first, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("pays", first_quick([True, False]))
def test_a_resumed_run_repeats_the_decision(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path, pays: bool
) -> None:
    taking(monkeypatch, compiled=0.5 if pays else 1.5, eager=1.0)
    config = tiny(texts, compile="auto")
    whole = train(config, tmp_path / "whole")
    (tmp_path / "cache").rename(tmp_path / "other machine")

    agree = Loop._agree

    def stop_after_five(loop: Loop, *given: float) -> int:
        return agree(loop, *given) or (signal.SIGTERM if loop.step == 4 else 0)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_agree", stop_after_five)
        with pytest.raises(RunStopped):
            train(config, tmp_path / "halves")
    # Now the other way is faster, but the run goes on as it began.
    measured = taking(monkeypatch, compiled=1.5 if pays else 0.5, eager=1.0)
    halves = train(config, tmp_path / "halves", resume=True)
    assert not measured
    assert_same_run(whole, halves)


def test_a_short_run_compiles_nothing(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilation, "SHORTEST", 1e6)
    folder = train(tiny(texts, compile="auto"), tmp_path / "run")
    assert not counted
    assert "too few" in decision(folder)["why"]


def test_a_compiler_that_fails_is_no_error(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(_compile, backend=fail))
    folder = train(tiny(texts, compile="auto"), tmp_path / "run")
    assert "no compiler here" in decision(folder)["why"]
    assert folder.finished


_compile = nn.Module.compile
