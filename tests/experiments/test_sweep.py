"""The learning rate of each family, chosen by trials."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_up import made_up
from softmax_rnn.cli.main import main
from softmax_rnn.experiments import reproduce, scheduler
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.plan import PlannedRun
from softmax_rnn.experiments.reproduce import figure_runs
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.scheduler import RunsFailedError
from softmax_rnn.experiments.sweep import RATES, chosen_rates, family, trials

RECALL, DEMO = FIGURES["recall"], SCALES["demo"]


def test_families() -> None:
    names = ("softmax", "taylor:2", "taylor:10+decay", "taylor_elu:1")
    assert [family(name) for name in names] == ["softmax", "taylor", "taylor+decay", "taylor_elu"]


def test_trials_are_of_the_middle_of_each_family(tmp_path: Path) -> None:
    runs = trials(RECALL, DEMO, tmp_path, {"steps": 50})
    families = {family(name) for panel in RECALL.panels for name in panel.variants}
    assert len(families) == 10
    found = {(str(run.config.attention), run.config.learning_rate) for run in runs}
    assert found == {
        (name, rate)
        for name in (
            *("softmax", "window:32"),
            *(f"{s}:2{d}" for s in ("taylor", "taylor_norm", "polynomial", "taylor_elu")
              for d in ("", "+decay")),
        )
        for rate in RATES
    }  # fmt: skip
    assert {(run.config.seed, run.config.steps) for run in runs} == {(0, 50)}
    widths = {run.config.attention: run.config.layer.get("qk_dim") for run in runs}
    assert widths["taylor:2"] == widths["softmax"] == 4
    assert widths["window:32"] is None
    assert len({run.folder.path for run in runs}) == len(runs)
    # Not where the figure's own runs are looked for.
    assert not any(run.folder.path.parents[1] == tmp_path / "demo" for run in runs)


def test_some_of_the_figures_variants_have_the_trials_of_all(tmp_path: Path) -> None:
    """Otherwise their runs would have other rates, and the whole figure could not use them."""
    every = trials(RECALL, DEMO, tmp_path, {})
    some = trials(RECALL.only(["taylor:1", "window:48"]), DEMO, tmp_path, {})
    chosen = [run for run in every if run.config.attention in ("taylor:2", "window:32")]
    assert [(run.config, run.folder.path) for run in some] == [
        (run.config, run.folder.path) for run in chosen
    ]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Figures are not drawn, which is slow."""
    monkeypatch.setattr(reproduce, "report_figure", lambda *_: [])
    return monkeypatch


def recall(out: Path, *more: str) -> int:
    sizes = ["hidden_size=16", "num_layers=1", "batch_size=2", "corpus=task:parity"]
    times = [f"{name}=2" for name in ("steps", "log_every", "evaluate_every", "save_every")]
    chosen = ["--variants", "softmax", "--parallel", "1", *more]
    return main(["reproduce", "recall", "--out", str(out), *chosen, "--with", *sizes, *times])


def made(failing: set[str], limits: list[float]) -> Callable[..., None]:
    """In place of ``run_all``: runs with made-up results, of which some fail."""

    def run_all(runs: Sequence[PlannedRun], root: Path, **options: Any) -> None:
        limits.append(options["stop_after"])
        waiting = [run for run in runs if not run.folder.finished]
        for run in waiting:
            if run.name in failing:
                continue
            path = run.folder.path
            accuracy = 1.0 - run.config.learning_rate
            found = made_up(
                path.parent / "made", "softmax", run.config.seed, 1.0, accuracy=accuracy
            )
            run.config.save(found.config_file)
            found.path.rename(path)
        if any(run.name in failing for run in waiting):
            raise RunsFailedError("1 of 4 runs did not finish: it diverged.")
        time.sleep(0.05)

    return run_all


def test_a_trial_may_fail(
    tmp_path: Path, undrawn: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"softmax-rate{rate:g}-seed0" for rate in RATES]
    undrawn.setattr(scheduler, "run_all", made(set(names), []))
    assert recall(tmp_path) == 1  # all of a family
    assert "1 of 4 runs did not finish" in capsys.readouterr().err
    undrawn.setattr(scheduler, "run_all", made({names[0]}, []))
    assert recall(tmp_path) == 0
    shown = capsys.readouterr()
    assert "Trials of learning rates that failed are left out. 1 of 4" in shown.err
    assert "Learning rates: softmax 0.00316" in shown.out
    assert len(list(tmp_path.glob("demo/recall-mqar*/softmax-seed0/summary.json"))) == 5


def test_the_time_limit_is_that_of_trials_and_runs_together(
    tmp_path: Path, undrawn: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    undrawn.setattr(scheduler, "run_all", made(set(), limits))
    assert recall(tmp_path, "--stop-after", "60s") == 0
    assert limits[0] == 60
    assert 0 < limits[1] <= 60 - 0.05


def test_seeds_that_are_added_have_the_same_rates(
    tmp_path: Path, undrawn: pytest.MonkeyPatch
) -> None:
    undrawn.setattr(scheduler, "run_all", made(set(), []))
    assert recall(tmp_path, "--seeds", "0") == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(before) == 4 + 5
    assert recall(tmp_path, "--seeds", "2", "1") == 0
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(after) == 4 + 3 * 5
    assert before.items() <= after.items()


def test_the_best_rate_is_chosen(tmp_path: Path) -> None:
    def trial(name: str, rate: float, accuracy: float, loss: float = 1.0) -> PlannedRun:
        where = tmp_path / f"{rate:g}"
        task = {"corpus": "task:mqar", "block_size": 64, "stop_at_accuracy": 0.99}
        fields = {**task, "learning_rate": rate}
        folder = made_up(where, name, 0, loss, accuracy=accuracy, **fields)
        return PlannedRun(folder.config, folder)

    runs = [
        trial("taylor:2", 1e-3, 0.5), trial("taylor:2", 1e-2, 0.7), trial("taylor:2", 1e-1, 0.6),
        # Above the accuracy at which runs end, the lower loss counts.
        trial("softmax", 1e-3, 0.994, 0.1), trial("softmax", 1e-2, 1.0, 0.2),
    ]  # fmt: skip
    assert chosen_rates(runs) == {"taylor": 1e-2, "softmax": 1e-3}
    waiting = replace(runs[0], config=replace(runs[0].config, attention="norm"))
    (waiting.folder.path / "summary.json").unlink()
    with pytest.raises(ValueError, match="No trial of a learning rate is finished for norm"):
        chosen_rates([waiting, *runs[1:]])


def test_the_figure_has_the_rates_of_its_families(tmp_path: Path) -> None:
    runs = figure_runs(RECALL, DEMO, tmp_path, [0], None, {"taylor": 0.5, "taylor+decay": 0.25})
    rates = {str(run.config.attention): run.config.learning_rate for run in runs}
    assert (rates["taylor:4"], rates["taylor:1+decay"]) == (0.5, 0.25)
    assert rates["softmax"] == rates["taylor_norm:2"] == 2e-3
    assert len(runs) == 4 + 4 * 33
    assert len({run.folder.path for run in runs}) == len(runs)
    wide = next(run for run in runs if "width16/taylor-3+decay" in str(run.folder.path))
    assert wide.config.layer == {"short_convolution": 3, "rotary": False, "qk_dim": 16}
