"""The learning rate of each family, chosen by trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from made_up import made_up
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.plan import PlannedRun
from softmax_rnn.experiments.reproduce import figure_runs
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.sweep import RATES, chosen_rates, family, trials

RECALL, DEMO = FIGURES["recall"], SCALES["demo"]


def test_families() -> None:
    names = ("softmax", "taylor:2", "taylor:10+decay", "taylor_elu:1")
    assert [family(name) for name in names] == ["softmax", "taylor", "taylor+decay", "taylor_elu"]


def test_trials_are_of_the_middle_of_each_family(tmp_path: Path) -> None:
    runs = trials(RECALL, DEMO, tmp_path, 7, {"steps": 50})
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
    assert {(run.config.seed, run.config.steps) for run in runs} == {(7, 50)}
    widths = {run.config.attention: run.config.layer.get("qk_dim") for run in runs}
    assert widths["taylor:2"] == widths["softmax"] == 4
    assert widths["window:32"] is None
    assert len({run.folder.path for run in runs}) == len(runs)
    # Not where the figure's own runs are looked for.
    assert not any(run.folder.path.parents[1] == tmp_path / "demo" for run in runs)


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
