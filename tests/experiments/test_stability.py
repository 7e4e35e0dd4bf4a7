"""Loss and spikes against the learning rate, from made-up runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from made_up import made_up
from softmax_rnn.experiments.figures import FIGURES, Panel
from softmax_rnn.experiments.reproduce import draw, figure_runs
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.sweep import Search, Sweep
from softmax_rnn.report.grid import Column
from softmax_rnn.report.stability import stability_table
from softmax_rnn.training.folder import append_row

STABILITY, DEMO = FIGURES["stability"], SCALES["demo"]


def test_every_setting_is_a_place_of_its_own(tmp_path: Path) -> None:
    """And a run has the rate, the clipping and the warm-up that its panel names."""
    for scale in SCALES.values():
        runs = figure_runs(STABILITY, scale, tmp_path, [0])
        assert len({run.folder.path for run in runs}) == len(runs) == 4 * 4 * 8
        found = {(run.config.learning_rate, run.config.clip, run.config.warmup > 0) for run in runs}
        assert len(found) == 16
    tamed = DEMO.config(STABILITY.panels[0], "norm", 0, {})
    assert (tamed.learning_rate, tamed.clip, tamed.warmup > 0) == (1e-3, 1.0, True)
    wild = DEMO.config(STABILITY.panels[-1], "norm", 0, {})
    assert (wild.learning_rate, wild.clip, wild.warmup) == (3e-2, 0.0, 0)
    place = "stdlib-learning_rate0.03-gradient_clip0-warmup_steps0"
    assert DEMO.place(STABILITY.panels[-1]) == ("stability", place)
    assert DEMO.place(Panel("", ())) == ("base", "stdlib")


def test_what_a_panel_varies_cannot_be_set(tmp_path: Path) -> None:
    """Its runs would not be what their folder says."""
    with pytest.raises(ValueError, match="learning_rate cannot be set here: it is what 'clipping"):
        figure_runs(STABILITY, DEMO, tmp_path, [0], {"learning_rate": 1e-3})
    assert figure_runs(STABILITY, DEMO, tmp_path, [0], {"steps": 100})
    with pytest.raises(ValueError, match="cannot be set here"):
        Search(STABILITY, DEMO, tmp_path, {}, Sweep("learning_rate", (1e-3, 2e-3))).runs()


def test_diverged_runs_are_part_of_the_figure(tmp_path: Path) -> None:
    experiment = STABILITY.only(["softmax", "length"])
    for run in figure_runs(experiment, DEMO, tmp_path, [0, 1]):
        config, path = run.config, run.folder.path
        wild = config.attention == "length" and config.learning_rate > 2e-2
        found = made_up(path.parent / "made", "softmax", config.seed, 1.5 + config.learning_rate)
        config.save(found.config_file)
        found.path.rename(path)
        if wild and config.seed:
            run.folder.summary_file.unlink()
            append_row(run.folder.events_file, {"step": 200, "event": "diverged", "why": ""})
        if wild and not config.seed:
            append_row(run.folder.events_file, {"step": 9, "event": "non_finite"})
    columns = []
    for panel in experiment.panels:
        parent = tmp_path / "demo" / DEMO.folder_name(panel)
        runs = [run.folder for run in figure_runs(experiment, DEMO, tmp_path, [0, 1])]
        columns.append(Column(panel.title, [run for run in runs if run.path.parent == parent]))
    table = stability_table(columns).set_index(["panel", "variant", "learning_rate"])
    assert len(table) == 4 * 2 * 4
    row = table.loc["neither", "length", 3e-2]
    assert (row.seeds, row.diverged, row.skipped, row.spikes) == (2, 1, 1, 0)
    assert row.loss == pytest.approx(1.53, abs=0.1)
    assert table.diverged.sum() == table.skipped.sum() == 4
    assert np.isfinite(table.loss).all()
    paths = draw(experiment, DEMO, tmp_path, [0, 1])
    assert [path.name for path in paths] == ["stability.png", "stability.svg"]
    assert all(path.stat().st_size > 10_000 for path in paths)
