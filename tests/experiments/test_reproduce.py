"""Figures as data: their plans, their costs, and one made whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from made_up import made_up
from softmax_rnn._utils.units import bytes_text, count_text, hours_text
from softmax_rnn.cli.main import main
from softmax_rnn.experiments.compare import compare_configs
from softmax_rnn.experiments.costs import cost
from softmax_rnn.experiments.figures import FAMILY, FIGURES
from softmax_rnn.experiments.plan import plan_table
from softmax_rnn.experiments.reproduce import draw, figure_runs, finished_runs, report_figure
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.scheduler import run_all
from softmax_rnn.training import RunConfig
from tiny import TINY, tiny


def plan_of(figure: str, scale: str, gpu: str = "H200", seeds: Sequence[int] = (0,)) -> Any:
    root = Path("runs")
    runs = figure_runs(FIGURES[figure], SCALES[scale], root, seeds)
    return plan_table(runs, root / scale, gpu)


def test_figure2_at_the_papers_scale_is_appendix_d() -> None:
    table = plan_of("figure2", "paper", "A100-80GB")
    assert len(table) == 9
    assert (table.parameters / 1e6).round().isin([275, 276]).all()
    assert (table.tokens_per_step == 36 * 1024).all()
    assert (table.steps == 100_000).all()
    assert not table.finished.any()
    run = figure_runs(FIGURES["figure2"], SCALES["paper"], Path("runs"), (0,))[1].config
    assert (run.attention, run.learning_rate, run.warmup, run.horizon) == (
        "norm",
        1e-4,
        10_000,
        1_000_000,
    )
    listed = figure_runs(FIGURES["figure2"], SCALES["paper-list"], Path("runs"), (0,))[0].config
    assert listed.horizon == 100_000
    assert run.corpus == "hf:gmongaras/EleutherAI_the_pile_deduplicated"


def test_figure3_is_larger_and_longer() -> None:
    table = plan_of("figure3", "paper")
    assert sorted(set((table.parameters / 1e7).round())) == [28, 208, 209]
    assert sorted(set(table.block_size)) == [1024, 4096]


@pytest.mark.parametrize(
    ("figure", "runs"), [("figure4", 6), ("figure5", 29), ("figure6", 17), ("gaps", 8)]
)
def test_runs_are_shared_and_planned_once(figure: str, runs: int) -> None:
    plan = figure_runs(FIGURES[figure], SCALES["demo"], Path("runs"), (0, 1))
    assert len(plan) == 2 * runs
    assert len({run.folder.path for run in plan}) == len(plan)
    assert {run.folder.path.parent for run in plan} == {Path("runs/demo/base-stdlib")}


def test_the_demos_figure2_has_three_corpora(tmp_path: Path) -> None:
    plan = figure_runs(FIGURES["figure2"], SCALES["demo"], tmp_path, (0,))
    assert len(plan) == 9
    for run in plan:
        assert run.folder.path.parent.name == f"base-{run.config.corpus}"
    names = ["torch-headers", "docstrings", "stdlib"]
    assert list(dict.fromkeys(run.config.corpus for run in plan)) == names


def test_an_evening_is_the_demo_on_more_tokens() -> None:
    runs = [
        figure_runs(FIGURES["gaps"], SCALES[scale], Path("runs"), (0, 1, 2))
        for scale in ("demo", "evening")
    ]
    assert len(runs[1]) == 24
    for short, long in zip(*runs, strict=True):
        assert long.config.steps == 5 * short.config.steps
        more = {"steps": 1_500, "evaluate_every": 300, "save_every": 300}
        assert replace(long.config, **more) == short.config


def test_costs_are_written_for_people() -> None:
    hours = [hours_text(hours) for hours in (1.683e-05, 0.2, 3.21, 9.96, 12.97, 4321.0)]
    assert hours == ["< 1 min", "12 min", "3.2 h", "10 h", "13 h", "4,321 h"]
    assert [count_text(count) for count in (1536e3, 3.686e9)] == ["1.5 M", "3.7 B"]
    assert [bytes_text(size) for size in (512, 2**20 - 1, 2**20 * 9452.0, 39_653_978.2 * 1024)] == [
        *("512 bytes", "1.0 MiB", "9.2 GiB", "37.8 GiB")
    ]


def test_costs_follow_the_sizes() -> None:
    small, demo = RunConfig.preset("small"), RunConfig()
    assert cost(small, "A100-80GB").tokens == 36 * 1024 * 100_000
    # 6 operations a parameter and token, and those of attention.
    assert cost(small, "H200").operations == pytest.approx(6 * 2.75e8 * 3.69e9, rel=0.1)
    assert cost(small, "H200").gpu_hours < cost(small, "A100-80GB").gpu_hours
    assert cost(demo, "H200").parameters == 722_304
    long = RunConfig.preset("small", block_size=4096, batch_size=9)
    assert cost(long, "H200").operations > cost(small, "H200").operations
    lean = RunConfig.preset("small", gradient_checkpointing=True)
    assert cost(lean, "H200").memory_bytes < cost(small, "H200").memory_bytes
    with pytest.raises(ValueError, match="Unknown GPU 'H20'. Did you mean 'H200'"):
        cost(small, "H20")


def test_the_cost_of_a_task_counts_its_own_tokens() -> None:
    runs = figure_runs(FIGURES["recall"], SCALES["small"], Path("runs"), (0,))
    config = runs[0].config  # two layers of softmax: no MLP, 8,192 tokens
    found = cost(config, "H200")
    layer = 4 * 128 * 128 + 3 * 3 * 128 + 128  # projections, convolutions, the norm
    rest = 2 * layer + 128 + 8192 * 128  # without the embedding
    assert found.parameters == 8192 * 128 + rest
    assert found.operations == 6.0 * 20_000 * 256 * 256 * (rest + 2 * 128 * 256)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="Unknown variant of figure4 'nrom'. Did you mean 'norm'"):
        FIGURES["figure4"].only(["nrom"])
    with pytest.raises(ValueError, match="A seed is given twice: 0, 0"):
        plan_of("figure4", "demo", seeds=[0, 0])


def test_some_of_a_figures_variants() -> None:
    some = FIGURES["figure6"].only(["gate", "length"])
    assert [panel.variants for panel in some.panels] == [("length", "gate"), ("gate", "length")]


@pytest.mark.parametrize("figure", ["figure2", "figure5", "figure6", "figure9", "gaps"])
def test_a_figure_is_drawn_from_what_is_finished(figure: str, tmp_path: Path) -> None:
    scale = SCALES["demo"]
    for run in figure_runs(FIGURES[figure], scale, tmp_path, (0, 1)):
        made = made_up(tmp_path / "made", str(run.config.attention), run.config.seed, 1.5)
        run.folder.path.parent.mkdir(parents=True, exist_ok=True)
        made.path.rename(run.folder.path)
    paths = draw(FIGURES[figure], scale, tmp_path, (0, 1))
    assert [path.name for path in paths[:2]] == [f"{figure}.png", f"{figure}.svg"]
    text = paths[1].read_text()
    for panel in FIGURES[figure].panels:
        if FIGURES[figure].kind == "orders":
            assert panel.title in text
        for variant in panel.variants if FIGURES[figure].kind == "curves" else ():
            assert variant in text
    found = finished_runs(SCALES["demo"], tmp_path)
    corpora = {"figure2": ("Docstrings", "PyTorch's C++ headers", "Python's standard library")}
    for title in corpora.get(figure, ()):
        assert f"{title}: test loss" in text
    assert len(found) == len(corpora.get(figure, ["stdlib"]))
    assert set(found["base", "stdlib"]["softmax"]) == {0, 1}


def test_the_family_is_drawn_against_its_states(tmp_path: Path) -> None:
    """With the names of the paper's variants, and attentions given by their fields."""
    scale, figure = SCALES["demo"], FIGURES["family"].only(["softmax", "taylor:2", "linear_elu"])
    for run in figure_runs(figure, scale, tmp_path, (0, 1, 2)):
        assert (run.config.num_layers, run.folder.path.parent.name) == (2, "family-stdlib")
        made = made_up(tmp_path / "made", str(run.config.attention), run.config.seed, 1.5)
        run.folder.path.parent.mkdir(parents=True, exist_ok=True)
        made.path.rename(run.folder.path)
    paths = report_figure(figure, scale, tmp_path, (0, 1, 2))
    assert [path.name for path in paths[:2]] == ["family.png", "family.svg"]
    text = paths[1].read_text()
    for words in (
        "KiB per layer and sequence",
        "a state that does not",
        "test loss minus softmax's",
        "taylor:2",
        "final test loss",
        "95% intervals",
    ):
        assert words in text
    assert "keys and values of all tokens" in text
    assert "keys and values of a window" not in text  # no run has one
    table = pd.read_csv(tmp_path / "demo" / "family-stdlib" / "results.csv")
    assert list(table.state_kind) == ["cache", "state", "state"]
    page = paths[-1].read_text()
    assert "Our own claims" in page
    assert set(finished_runs(SCALES["demo"], tmp_path)) == {("family", "stdlib")}


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_every_condition(scale: str) -> None:
    for figure in FIGURES.values():
        for panel in figure.panels:
            SCALES[scale].config(panel, "softmax", 0, {})


def test_a_variant_that_cannot_be_trained_is_named_before_anything_runs(
    texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "large.yaml").write_text("denominator: none\nscale: 1.0e+30\n")
    words = ["softmax", f"large={tmp_path / 'large.yaml'}"]
    runs = compare_configs(words, [0], tiny(texts), tmp_path / "runs")
    for state in range(10):  # whatever was drawn before
        torch.manual_seed(state)
        with pytest.raises(ValueError, match="large-seed0 cannot be trained: OverflowError: "):
            run_all(runs, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_family_is_named_once() -> None:
    assert len(set(FAMILY)) == len(FAMILY) == 16
    assert [panel.variants for panel in FIGURES["family"].panels] == [FAMILY]


def test_reproduce_runs_what_is_missing_and_draws(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = [f"{key}={value}" for key, value in {**TINY, "corpus": texts}.items()]
    words = ["reproduce", "figure4", "--out", str(tmp_path), "--variants", "softmax", "norm"]
    words += ["--seeds", "0", "--with", *fields]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for name in ("figure4.png", "figure4.svg", "figure4/report.html"):
        assert (tmp_path / "demo" / name).exists()
        assert str(tmp_path / "demo" / name) in shown
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(before) == 2
    assert main(words) == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
