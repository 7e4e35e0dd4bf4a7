"""Power laws of gaps, from made-up gaps and runs whose law is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from made_up import made_up
from softmax_rnn.report.curves import seed_interval
from softmax_rnn.report.gaps import draw_gaps, gap_table
from softmax_rnn.report.laws import PAPER_TOKENS, fit_law, gaps, law_of_ends
from softmax_rnn.training.folder import RunFolder

TOKENS = np.arange(3, 16) * 512e3  # of an evening's evaluations after the warm-up


def test_the_papers_tokens() -> None:
    assert PAPER_TOKENS == 100_000 * 36 * 1024


@pytest.mark.parametrize("points", [2, 13])
def test_a_law_without_noise_is_found(points: int) -> None:
    tokens = TOKENS[:points]
    levels, exponents = np.array([0.3, 0.31, 0.33]), np.array([1.0, 1.1, 1.2])
    law = fit_law(tokens, levels[:, None] * (tokens / 1.5e6) ** -exponents[:, None])
    np.testing.assert_allclose(law.exponent, exponents, rtol=1e-9)
    assert not law.levels_off
    expected = levels * (PAPER_TOKENS / 1.5e6) ** -exponents
    mean, low, high = law.gap(PAPER_TOKENS)
    assert mean == pytest.approx(stats.gmean(expected), rel=1e-9)
    logs = np.log(expected)
    ends = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    np.testing.assert_allclose([low, high], np.exp(ends), rtol=1e-9)


def test_a_law_of_tokens_in_any_shape() -> None:
    seeds = np.array([0.3, 0.31, 0.33])[:, None] * (TOKENS / 1e6) ** -0.5
    law = fit_law(TOKENS, seeds)
    for part, single in zip(law.gap(TOKENS), law.gap(TOKENS[3]), strict=True):
        assert part.shape == TOKENS.shape
        assert part[3] == pytest.approx(single)


def test_a_law_that_levels_off_has_a_constant() -> None:
    constants = np.array([0.05, 0.052, 0.055])[:, None]
    law = fit_law(TOKENS, 0.2 * (TOKENS / 1.5e6) ** -1.5 + constants)
    assert law.levels_off
    np.testing.assert_allclose(np.exp(law.constant), constants[:, 0], rtol=1e-4)
    np.testing.assert_allclose(law.exponent, 1.5, rtol=1e-3)
    mean, low, high = law.gap(PAPER_TOKENS)
    assert low < mean < high
    assert mean == pytest.approx(0.0523, abs=1e-3)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Seeds differ in level and exponent, and the noise of a run's points is correlated."""
    draw = np.random.default_rng(0)
    runs, seeds, level, exponent = 1500, 3, np.log(0.3), 1.1
    x = np.log(TOKENS / 1.5e6)
    covered = {"exponent": 0, "gap": 0}
    constants = 0
    truth = np.exp(level - exponent * np.log(PAPER_TOKENS / 1.5e6))
    for _ in range(runs):
        logs = draw.normal(level, 0.1, (seeds, 1)) - draw.normal(exponent, 0.1, (seeds, 1)) * x
        noise = draw.normal(0, 0.02, (seeds, len(x))).cumsum(axis=1)
        law = fit_law(TOKENS, np.exp(logs + noise))
        constants += law.levels_off
        if law.levels_off:
            continue
        for name, value, (_, low, high) in (
            ("exponent", exponent, seed_interval(law.exponent)),
            ("gap", truth, law.gap(PAPER_TOKENS)),
        ):
            covered[name] += low <= value <= high
    assert constants / runs < 0.04  # a one-sided test at 2.5%
    for count in covered.values():
        assert 0.93 < count / (runs - constants) < 0.97


def world(
    root: Path, gap: Callable[[float, int], float], seeds: int = 3, steps: int = 200
) -> list[RunFolder]:
    """Runs of softmax and gate whose test losses differ by ``gap(step, seed)``."""
    runs = []
    for seed in range(seeds):
        for name in ("softmax", "gate"):
            end = 1.5 + (name == "gate") * gap(steps, seed)
            run = made_up(root, name, seed, end, steps=steps, warmup_steps=40)
            rows = pd.DataFrame({"step": range(20, steps + 1, 20)})
            rows["tokens"] = rows.step * 1024
            rows["test_loss"] = 1.5 + (name == "gate") * rows.step.map(lambda s, n=seed: gap(s, n))
            run.evaluations_file.write_text(rows.to_json(orient="records", lines=True))
            summary = run.summary | {"test_loss": end}
            run.summary_file.write_text(json.dumps(summary))
            runs.append(run)
    return runs


def test_the_gaps_of_runs(tmp_path: Path) -> None:
    runs = world(tmp_path, lambda step, seed: 5 * (1 + seed / 50) * step**-0.8)
    (gap,) = gaps(runs)
    assert (gap.variant, gap.reason) == ("gate", "")
    assert gap.tokens[0] == 60 * 1024  # the first evaluation after the warm-up
    assert gap.seeds[1] == pytest.approx(5.1 * (gap.tokens / 1024) ** -0.8)
    assert gap.law is not None
    assert gap.law.exponent == pytest.approx(0.8)
    (row,) = gap_table([gap]).to_dict("records")
    assert row["gap"] == pytest.approx(5.1 * 200**-0.8, abs=0.01)
    assert row["extrapolated"] == pytest.approx(5.1 * (PAPER_TOKENS / 1024) ** -0.8, rel=0.01)
    assert row["extrapolated_low"] < row["extrapolated"] < row["extrapolated_high"]


@pytest.mark.parametrize(
    ("gap", "seeds", "reason"),
    [
        (lambda step, seed: 1 / step, 2, "fewer than three seeds"),
        (lambda step, seed: (seed - 1) * 0.1, 3, "no significant gap"),
        (lambda step, seed: -0.5, 3, "the final gap is negative"),
        (lambda step, seed: (step - 70) / 100, 3, "not positive at every evaluation"),
    ],
)
def test_why_there_is_no_law(
    gap: Callable[[float, int], float], seeds: int, reason: str, tmp_path: Path
) -> None:
    (found,) = gaps(world(tmp_path, gap, seeds))
    assert found.law is None
    assert found.reason == reason
    assert gap_table([found]).reason[0] == reason


def test_the_law_of_the_ends_of_runs(tmp_path: Path) -> None:
    """Within a run the gap is another: its learning rate has not decayed."""

    def gap_of(steps: int) -> Callable[[float, int], float]:
        return lambda step, seed: (1 if step == steps else 2) * (1 + seed / 50) * step**-0.5

    scales = [world(tmp_path / str(n), gap_of(n), steps=n) for n in (200, 1000)]
    law = law_of_ends(scales, "gate")
    assert law is not None
    assert law.exponent == pytest.approx(0.5)
    assert law.gap(1024 * 1000)[0] == pytest.approx(stats.gmean([1, 1.02, 1.04]) * 1000**-0.5)
    assert law_of_ends(scales[:1], "gate") is None
    assert law_of_ends([scales[0], scales[0]], "gate") is None
    assert law_of_ends(scales, "norm") is None
    assert law_of_ends([scales[0], scales[1][:4]], "gate") is None  # two seeds


def test_the_figure_of_gaps(tmp_path: Path) -> None:
    runs = world(tmp_path, lambda step, seed: 5 * (1 + seed / 50) * step**-0.8)
    runs += [made_up(tmp_path, "norm", 0, 1.5)]
    runs[-1].evaluations_file.write_text(runs[0].evaluations_file.read_text())
    paths = draw_gaps(runs, "Gaps", tmp_path / "gaps")
    assert [path.name for path in paths] == ["gaps.png", "gaps.svg", "gaps.csv"]
    text = paths[1].read_text()
    assert "exponent 0.80 [0.80, 0.80]" in text
    assert "norm: fewer than three seeds" in text
    assert "Extrapolated to the paper's tokens" in text
    assert list(pd.read_csv(paths[2]).variant) == ["norm", "gate"]
    assert draw_gaps(runs[:2], "Gaps", tmp_path / "none")  # without any law
