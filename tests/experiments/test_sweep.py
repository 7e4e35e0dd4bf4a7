"""A setting of each variant, chosen by trials that never see the test split."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_up import made_up
from softmax_rnn.cli.main import main
from softmax_rnn.experiments import reproduce, scheduler
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.plan import PlannedRun
from softmax_rnn.experiments.reproduce import figure_runs, finished_runs, report_figure
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.scheduler import RunsFailedError
from softmax_rnn.experiments.sweep import Search, Sweep, copy_finished, family
from softmax_rnn.report.sweeps import read_sweep
from softmax_rnn.report.table import require_comparable, results

RECALL, FIGURE4, DEMO = FIGURES["recall"], FIGURES["figure4"], SCALES["demo"]
THREE = FIGURE4.only(["softmax", "norm", "gate"])
RATES = Sweep("learning_rate", (1e-3, 2e-3, 4e-3))
OF_RECALL = Sweep.parse(RECALL.sweep)
# The best rate of each variant, and how fast its loss rises beside it.
BEST = {"softmax": 2e-3, "norm": 4e-3, "gate": 2.5e-4}


def measured(diverging: Callable[[PlannedRun], bool] = lambda run: False) -> Any:
    """In place of ``run_all``: runs with made-up results, of which some diverge.

    The loss is that of a parabola in the logarithm of the rate, on the validation split; on the
    test split another rate would be best.
    """

    def run_all(runs: Sequence[PlannedRun], *_: Any, **options: Any) -> None:
        run_all.calls.append([run for run in runs if not run.folder.finished])  # type: ignore[attr-defined]
        run_all.limits.append(options.get("stop_after"))  # type: ignore[attr-defined]
        run_all.tolerant.append(options.get("may_diverge"))  # type: ignore[attr-defined]
        waiting = [run for run in runs if not run.folder.finished]
        for run in waiting:
            if diverging(run):
                continue
            path, config = run.folder.path, run.config
            best = BEST.get(str(config.attention), 2e-3) * (
                1 if config.evaluate_on == "validation" else 10
            )
            loss = 1.0 + 0.1 * np.log(config.learning_rate / best) ** 2
            found = made_up(
                path.parent / "made", "softmax", config.seed, loss, accuracy=1 / (1 + loss)
            )
            config.save(found.config_file)
            found.path.rename(path)
        time.sleep(0.02)

    run_all.calls, run_all.limits, run_all.tolerant = [], [], []  # type: ignore[attr-defined]
    return run_all


def test_sweeps_are_checked() -> None:
    sweep = Sweep.parse("learning_rate=4e-3,1e-3,2e-3")
    assert sweep == Sweep("learning_rate", (1e-3, 2e-3, 4e-3))
    assert Sweep.parse("precision=fp32,bf16").values == ("fp32", "bf16")
    for text, message in {
        "learning_rate": "takes SETTING=VALUE,VALUE,...",
        "learning_rat=1,2": "Did you mean 'learning_rate'",
        "seed=1,2": "Unknown setting of --sweep 'seed'",
        "evaluate_on=test,validation": "Unknown setting of --sweep",
        # Their losses would be of other tokens.
        **{f"{x}=1,2": "Unknown setting" for x in ("block_size", "split_seed", "packing")},
        "learning_rate=1e-3": "needs two values or more",
        "learning_rate=1e-3,2e-3,0.001": "has the value 0.001 twice",
    }.items():
        with pytest.raises(ValueError, match=message):
            Sweep.parse(text)
    with pytest.raises(ValueError, match="given by both --sweep and --with"):
        Search(THREE, DEMO, Path(), {"learning_rate": 1.0}, RATES)


def test_every_trial_is_evaluated_on_validation_documents(tmp_path: Path) -> None:
    """Never on the test split, which figures and claims are about."""
    momenta = Sweep("beta2", (0.9, 0.99, 0.999))  # which no figure varies itself
    for figure in FIGURES.values():
        search = Search(figure, DEMO, tmp_path, {}, momenta)
        assert {run.config.evaluate_on for run in search.runs()} == {"validation"}
        assert {run.config.seed for run in search.runs()} == {0}
        own = figure_runs(figure, DEMO, tmp_path, [0, 1])
        assert {run.config.evaluate_on for run in own} == {"test"}
        places = {run.folder.path for run in search.runs()}
        assert len(places) == len(search.runs())
        assert not places & {run.folder.path for run in own}
        with pytest.raises(ValueError, match="evaluate_on"):
            Search(figure, DEMO, tmp_path, {}, Sweep("evaluate_on", ("test", "validation")))


def test_the_best_value_at_an_edge_widens_the_grid(tmp_path: Path) -> None:
    search, run_all = Search(THREE, DEMO, tmp_path, {}, RATES), measured()
    search.execute(run_all)
    panel = THREE.panels[0]
    assert {name: search.chosen(panel, name) for name in BEST} == {
        name: {"learning_rate": rate} for name, rate in BEST.items()
    }
    tried = {
        name: sorted(
            run.config.learning_rate for run in search.runs() if run.config.attention == name
        )
        for name in BEST
    }
    assert tried == {
        "softmax": [1e-3, 2e-3, 4e-3],
        "norm": [1e-3, 2e-3, 4e-3, 8e-3],
        "gate": [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3],
    }
    # The largest and the smallest are asked for in the same round.
    assert [len(waiting) for waiting in run_all.calls] == [9, 2, 1, 1]


def test_a_grid_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the loss falls for ever, and where no run can have a value."""
    monkeypatch.setitem(BEST, "softmax", 1e9)
    search = Search(FIGURE4.only(["softmax"]), DEMO, tmp_path, {}, RATES)
    search.execute(measured())
    assert len(search.runs()) == 3 + 4
    assert "The best learning_rate of softmax, 0.064, is at the end" in capsys.readouterr().err
    heads = Search(FIGURE4.only(["softmax"]), DEMO, tmp_path, {}, Sweep("num_heads", (2, 4)))
    heads.execute(measured())  # all alike: the first is the best, and half of it is 1
    assert {run.config.num_heads for run in heads.runs()} == {1, 2, 4}
    assert "The best num_heads of softmax, 1, is at the end" in capsys.readouterr().err
    words = Search(
        FIGURE4.only(["softmax"]), DEMO, tmp_path, {}, Sweep("precision", ("fp32", "bf16"))
    )
    words.execute(measured())
    assert len(words.runs()) == 2


def test_an_interrupted_sweep_resumes(tmp_path: Path) -> None:
    """What was finished is not run again, and the same values are chosen."""
    whole = Search(THREE, DEMO, tmp_path / "whole", {}, RATES)
    whole.execute(measured())
    stops, tried = 0, []
    while True:
        search, left = Search(THREE, DEMO, tmp_path / "parts", {}, RATES), 2

        def some(runs: Sequence[PlannedRun]) -> None:
            nonlocal left
            for run in runs:
                if not run.folder.finished:
                    if not left:
                        raise KeyboardInterrupt
                    left -= 1
                    tried.append(run.folder.path)
                    measured()([run])

        try:
            search.execute(some)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops > 3
    assert len(tried) == len(set(tried)) == len(whole.runs())
    assert search.summary() == whole.summary()


def test_a_trial_may_diverge(tmp_path: Path) -> None:
    search = Search(THREE, DEMO, tmp_path, {}, RATES)
    with pytest.raises(RunsFailedError, match="norm diverges with every .* 0.001, 0.002, 0.004"):
        search.execute(measured(lambda run: run.config.attention == "norm"))
    search.execute(measured(lambda run: run.config.learning_rate > 3e-3))
    assert search.chosen(THREE.panels[0], "norm") == {"learning_rate": 2e-3}  # 4e-3 was tried
    search.record(DEMO.with_best("learning_rate"))
    record = read_sweep(tmp_path / "demo-learning_rate" / "base-stdlib")
    assert record is not None
    failed = [trial for trial in record["trials"] if trial["loss"] is None]
    assert [(trial["variant"], trial["value"]) for trial in failed] == [("norm", 4e-3)]


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """The runs of three variants, each at its best rate, and of some at the scale's own."""
    search, best = Search(THREE, DEMO, tmp_path, {}, RATES), DEMO.with_best("learning_rate")
    search.execute(measured())
    measured()(figure_runs(THREE, DEMO, tmp_path, [0, 1]))
    runs = figure_runs(THREE, best, tmp_path, [0, 1, 2], {}, search.chosen)
    search.record(best)
    copy_finished(runs, tmp_path / best.folder, tmp_path / DEMO.folder)
    # softmax has the best rate at which it was trained before.
    assert [run.name for run in runs if run.folder.finished] == ["softmax-seed0", "softmax-seed1"]
    measured()(runs)
    return tmp_path


def test_tables_say_the_chosen_value(swept: Path) -> None:
    best = DEMO.with_best("learning_rate")
    (folder,) = (swept / best.folder).glob("base-*")
    runs = [
        run
        for seeds in finished_runs(best, swept)["base", "stdlib"].values()
        for run in seeds.values()
    ]
    table = results(runs).set_index("variant")
    assert table.value.to_dict() == BEST
    assert set(table.setting) == {"learning_rate"}
    paths = report_figure(THREE, best, swept, [0, 1, 2])
    assert swept / best.folder / "figure4-sweep.png" in paths
    page = (folder / "report.html").read_text()
    assert "learning rate" in page
    assert "0.00025" in page
    assert (
        "the best learning rate of each"
        in (swept / best.folder / "figure4" / "report.html").read_text()
    )
    # Without the record they are runs with different settings, which no table mixes.
    (folder / "sweep.json").unlink()
    with pytest.raises(ValueError, match="cannot be compared: learning_rate"):
        require_comparable(runs)
    (folder / "sweep.json").write_text("{}")
    with pytest.raises(ValueError, match="sweep.json: setting is missing"):
        require_comparable(runs)


def test_claims_of_both_kinds_of_runs(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, folder in (([], "demo"), (["--best", "learning_rate"], "demo-learning_rate")):
        assert main(["claims", str(swept), *options]) == 0
        assert (swept / folder / "claims.json").exists()
    capsys.readouterr()
    assert main(["claims", str(swept), "--best", "steps"]) != 0
    assert "--sweep steps=VALUE" in capsys.readouterr().err.replace("\n", " ")


def test_another_figure_adds_to_the_record(tmp_path: Path) -> None:
    best = DEMO.with_best("learning_rate")
    for figure in (THREE, FIGURES["figure6"].only(["softmax", "clamped"])):
        search = Search(figure, DEMO, tmp_path, {}, RATES)
        search.execute(measured())
        search.record(best)
    record = read_sweep(tmp_path / best.folder / "base-stdlib")
    assert record is not None
    assert record["chosen"] == {**BEST, "clamped": 2e-3}
    found = [(trial["variant"], trial["value"]) for trial in record["trials"]]
    assert len(found) == len(set(found)) == 3 + 4 + 6 + 3


def test_families() -> None:
    names = ("softmax", "taylor:2", "taylor:10+decay", "taylor_elu:1")
    assert [family(name) for name in names] == ["softmax", "taylor", "taylor+decay", "taylor_elu"]


def test_trials_are_of_the_middle_of_each_family(tmp_path: Path) -> None:
    runs = Search(RECALL, DEMO, tmp_path, {"steps": 50}, OF_RECALL).runs()
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
        for rate in OF_RECALL.values
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
    every = Search(RECALL, DEMO, tmp_path, {}, OF_RECALL).runs()
    part = RECALL.only(["taylor:1", "window:48"])
    some = Search(part, DEMO, tmp_path, {}, OF_RECALL).runs()
    chosen = [run for run in every if run.config.attention in ("taylor:2", "window:32")]
    assert [(run.config, run.folder.path) for run in some] == [
        (run.config, run.folder.path) for run in chosen
    ]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Figures are not drawn, which is slow."""
    monkeypatch.setattr(reproduce, "report_figure", lambda *_: [])
    return monkeypatch  # type: ignore[return-value]


def recall(out: Path, *more: str) -> int:
    sizes = ["hidden_size=16", "num_layers=1", "batch_size=2", "corpus=task:parity"]
    times = [f"{name}=2" for name in ("steps", "log_every", "evaluate_every", "save_every")]
    chosen = ["--variants", "softmax", "--parallel", "1", *more]
    return main(["reproduce", "recall", "--out", str(out), *chosen, "--with", *sizes, *times])


def test_the_time_limit_is_that_of_trials_and_runs_together(
    tmp_path: Path, undrawn: pytest.MonkeyPatch
) -> None:
    run_all = measured()
    undrawn.setattr(scheduler, "run_all", run_all)
    assert recall(tmp_path, "--stop-after", "60s") == 0
    assert 59 < run_all.limits[0] <= 60
    assert 0 < run_all.limits[-1] <= run_all.limits[0] - 0.02
    assert run_all.tolerant == [True] * (len(run_all.tolerant) - 1) + [False]  # trials may diverge


def test_seeds_that_are_added_have_the_same_rates(
    tmp_path: Path, undrawn: pytest.MonkeyPatch
) -> None:
    undrawn.setattr(scheduler, "run_all", measured())
    assert recall(tmp_path, "--seeds", "0") == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert recall(tmp_path, "--seeds", "2", "1") == 0
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(after) == len(before) + 2 * 5
    assert before.items() <= after.items()


def test_the_best_trial_of_a_task(tmp_path: Path) -> None:
    """The accuracy counts, up to the one at which runs end; then the number of steps."""
    search = Search(
        RECALL.only(["softmax"]), DEMO, tmp_path, {}, Sweep("learning_rate", (1e-3, 1e-2, 1e-1))
    )
    accuracies = {1e-3: (0.994, 0.1), 1e-2: (1.0, 0.2), 1e-1: (0.5, 0.05)}
    for run in search.runs():
        accuracy, loss = accuracies[run.config.learning_rate]
        path = run.folder.path
        found = made_up(path.parent / "made", "softmax", 0, loss, accuracy=accuracy)
        run.config.save(found.config_file)
        found.path.rename(path)
    assert search.chosen(RECALL.panels[0], "softmax") == {"learning_rate": 1e-3}


def test_the_figure_has_the_values_of_its_families(tmp_path: Path) -> None:
    rates = {"taylor": 0.5, "taylor+decay": 0.25}
    runs = figure_runs(
        RECALL, DEMO, tmp_path, [0], None,
        lambda panel, name: {"learning_rate": rates.get(family(name), 2e-3)},
    )  # fmt: skip
    found = {str(run.config.attention): run.config.learning_rate for run in runs}
    assert (found["taylor:4"], found["taylor:1+decay"]) == (0.5, 0.25)
    assert found["softmax"] == found["taylor_norm:2"] == 2e-3
    assert len(runs) == 4 + 4 * 33
    assert len({run.folder.path for run in runs}) == len(runs)
    wide = next(run for run in runs if "width16/taylor-3+decay" in str(run.folder.path))
    assert wide.config.layer == {"short_convolution": 3, "rotary": False, "qk_dim": 16}


def test_a_dry_run_counts_the_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--variants", "softmax", "norm", "--out", str(tmp_path), "--dry-run"]
    assert main(["reproduce", "figure4", *chosen, "--sweep", "learning_rate=1e-3,2e-3,4e-3"]) == 0
    shown = capsys.readouterr().out
    assert "8 to run" in shown
    assert "Trials are added while the best value" in shown
    assert not list(tmp_path.iterdir())
