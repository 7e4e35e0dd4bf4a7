"""Verdicts from made-up runs, where the truth is known."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from made_up import made_up
from softmax_rnn.experiments.claims import CLAIMS, OWN, PAPER, Check
from softmax_rnn.experiments.figures import ATTENTIONS, FIGURES
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.verdicts import (
    count_spikes,
    examine,
    judge,
    rich_verdicts,
    verdict_table,
)
from softmax_rnn.ops.variants import resolve_layer
from softmax_rnn.report.table import may_name
from softmax_rnn.training.folder import RunFolder, append_row
from softmax_rnn.training.metrics import loss_spikes

DEMO = SCALES["demo"]


def runs_of(
    root: Path, losses: dict[str, float], seeds: int = 3
) -> dict[str, dict[int, RunFolder]]:
    return {
        name: {seed: made_up(root, name, seed, loss) for seed in range(seeds)}
        for name, loss in losses.items()
    }


@pytest.mark.parametrize(
    ("check", "loss", "outcome"),
    [
        (Check("norm", "equal", "softmax", 0.03), 1.505, "holds"),
        (Check("norm", "equal", "softmax", 0.03), 1.60, "fails"),
        (Check("norm", "equal", "softmax", 0.0051), 1.505, "undecided"),
        (Check("norm", "worse", "softmax", 0.05), 1.60, "holds"),
        (Check("norm", "worse", "softmax", 0.05), 1.52, "fails"),
        (Check("norm", "better", "softmax"), 1.40, "holds"),
        (Check("norm", "better", "softmax"), 1.60, "fails"),
        (Check("norm", "slightly worse", "softmax", 0.1), 1.55, "holds"),
        (Check("norm", "slightly worse", "softmax", 0.1), 1.70, "fails"),
        (Check("norm", "slightly worse", "softmax", 0.1), 1.40, "fails"),
        (Check("norm", "worse", "gate", 0.05), 1.60, "not run"),
        (Check("norm", "no worse", "softmax", 0.03), 1.505, "holds"),
        (Check("norm", "no worse", "softmax", 0.03), 1.20, "holds"),
        (Check("norm", "no worse", "softmax", 0.03), 1.60, "fails"),
        (Check("norm", "no worse", "softmax", 0.0051), 1.505, "undecided"),
    ],
)
def test_a_check(check: Check, loss: float, outcome: str, tmp_path: Path) -> None:
    finding = examine(check, runs_of(tmp_path, {"softmax": 1.5, "norm": loss}), "base, stdlib")
    assert finding.outcome == outcome
    assert finding.seeds == (0 if outcome == "not run" else 3)
    if finding.difference is not None:
        assert finding.difference.mean == pytest.approx(loss - 1.5, abs=0.01)


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    check = Check("norm", "worse", "softmax", 0.05)
    runs = runs_of(tmp_path, {"softmax": 1.5, "norm": 1.6})
    assert examine(check, runs, "").outcome == "holds"
    del runs["softmax"][1], runs["softmax"][2]
    finding = examine(check, runs, "")
    assert (finding.outcome, finding.reason, finding.seeds) == ("undecided", "one seed", 1)
    assert re.fullmatch(r"\+0\.\d{4} \[.*\] \(test blocks only\)", finding.found)
    verdicts = judge({("base", "stdlib"): runs}, DEMO)
    assert {verdict.outcome for verdict in verdicts} <= {"undecided", "not run"}
    (row,) = [row for row in verdict_table(verdicts) if (row["source"], row["claim"]) == (PAPER, 1)]
    assert row["interval_over"] == "test blocks only"
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(rich_verdicts(verdicts))
    text = shown.export_text()
    assert re.search(r"undecided: one seed +\+0\.\d+ \[.*\] \(test blocks only\)", text)
    assert re.search(r"3\. Both hold .* not run +figure3", text)  # what to reproduce


def add_spikes(folder: RunFolder, count: int) -> None:
    """Add rows of an even loss with this many spikes."""
    last = folder.metrics.iloc[-1].to_dict()
    for step in range(210, 210 + 200 * count, 10):
        row = {**last, "step": step, "tokens": 2048 * step}
        append_row(folder.metrics_file, {**row, "loss": 9.0 if step % 200 == 150 else 1.5})
    assert loss_spikes(folder.metrics.loss) == count


def test_spikes_are_counted_over_all_settings(tmp_path: Path) -> None:
    places = [runs_of(tmp_path / place, {"softmax": 1.5, "gate": 1.5}) for place in ("a", "b")]
    check = Check("gate", "spikier", "softmax")
    assert count_spikes(check, []).outcome == "not run"
    assert count_spikes(check, places).reason == "no spikes"
    for seed, place in enumerate((0, 1, 1)):
        add_spikes(places[place]["gate"][seed], 2)
    add_spikes(places[0]["softmax"][1], 1)
    finding = count_spikes(check, places)
    assert (finding.outcome, finding.spikes, finding.seeds) == ("holds", (6, 1), 3)
    assert finding.found == "6 and 1 spikes"
    assert count_spikes(Check("softmax", "spikier", "gate"), places).outcome == "fails"
    add_spikes(places[0]["softmax"][0], 2)  # as many as gate with this seed
    finding = count_spikes(check, places)
    assert (finding.outcome, finding.reason) == ("undecided", "some seeds only")
    for runs in places:  # of a run that diverged there is no partner to compare with
        del runs["softmax"][1], runs["softmax"][0]
    finding = count_spikes(check, places)
    assert (finding.outcome, finding.reason, finding.spikes) == ("undecided", "one seed", (2, 0))


def test_spikes_are_judged_where_they_can_be_seen(tmp_path: Path) -> None:
    """In the figure about stability, whose losses decide nothing."""
    panel = FIGURES["stability"].panels[0]
    unsteady = runs_of(tmp_path / "unsteady", {"softmax": 1.5, "gate": 1.9})
    for folder in unsteady["gate"].values():
        add_spikes(folder, 1)
    found = {DEMO.place(panel): unsteady}
    claim = judge(found, DEMO)[1]
    assert [finding.outcome for finding in claim.findings] == ["not run", "holds"]
    assert claim.outcome == "undecided"
    found["base", "stdlib"] = runs_of(tmp_path / "base", {"softmax": 1.5, "gate": 1.55})
    assert judge(found, DEMO)[1].outcome == "holds"
    found["base", "stdlib"] = runs_of(tmp_path / "worse", {"softmax": 1.5, "gate": 1.9})
    assert judge(found, DEMO)[1].outcome == "fails"


def test_noise_and_descent_are_no_spikes() -> None:
    draw = np.random.default_rng(0)
    steps = np.arange(400)
    falling = 5 * np.exp(-steps / 60) + 1.5 + 0.05 * draw.standard_normal(400)
    assert loss_spikes(pd.Series(falling)) == 0
    falling[[200, 201, 300]] += 1.0  # two rows of one spike, and another
    assert loss_spikes(pd.Series(falling)) == 2


def test_verdicts_of_a_world_as_the_paper_says(tmp_path: Path) -> None:
    losses = {"softmax": 1.5, "norm": 1.503, "gate": 1.55}
    losses |= {"linear_elu": 2.0, "linear_relu": 2.0, "linear_cosine": 1.9}
    losses |= {"taylor:0": 2.5, "taylor:1": 2.0, "taylor:2": 1.8, "taylor:4": 1.6}
    losses |= {"taylor:10": 1.505, "detached": 1.9, "clamped": 1.5}
    judged = judge({("base", "stdlib"): runs_of(tmp_path, losses)}, DEMO)
    verdicts = {v.claim.number: v for v in judged if v.claim.source == PAPER}
    assert {v.outcome for v in judged if v.claim.source == OWN} == {"not run"}
    assert verdicts[1].outcome == "holds"
    assert verdicts[3].outcome == "not run"
    assert verdicts[4].outcome == "holds"
    assert verdicts[5].outcome == "holds"
    assert verdicts[6].outcome == "not run"
    assert verdicts[7].outcome == "holds"
    assert verdicts[2].outcome == "undecided"  # no spike in any run decides nothing
    table = verdict_table(list(verdicts.values()))
    assert list(dict.fromkeys(row["claim"] for row in table)) == list(range(1, 12))
    assert min(row["low"] for row in table if row["claim"] == 4) > 0.05
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(rich_verdicts(list(verdicts.values())))
    text = shown.export_text()
    assert "4. Every linear variant is clearly worse" in text
    assert "linear_elu worse than softmax by > 0.05" in text
    assert judge({}, DEMO)[0].outcome == "not run"


def test_one_failure_fails_a_claim(tmp_path: Path) -> None:
    losses = {"softmax": 1.5, "norm": 1.5, "gate": 1.5}
    losses |= {"linear_elu": 2.0, "linear_relu": 2.0, "linear_cosine": 1.5}
    verdicts = judge({("base", "stdlib"): runs_of(tmp_path, losses)}, DEMO)
    assert verdicts[3].outcome == "fails"


def test_a_claim_is_judged_on_the_corpora_of_its_figures(tmp_path: Path) -> None:
    """Figure 2 has three corpora, figure 4 one: the others leave its claims as they are."""
    losses = {"softmax": 1.5, "norm": 1.5, "gate": 1.55}
    here = losses | {"linear_elu": 2.0, "linear_relu": 2.0, "linear_cosine": 1.9}
    found = {
        ("base", "stdlib"): runs_of(tmp_path / "here", here),
        ("base", "docstrings"): runs_of(tmp_path / "there", losses | {"norm": 1.6}),
    }
    verdicts = judge(found, DEMO)
    assert [finding.outcome for finding in verdicts[0].findings] == ["holds", "fails"]
    assert verdicts[3].outcome == "holds"
    assert {finding.where for finding in verdicts[3].findings} == {"base, stdlib"}
    assert {finding.where for finding in verdicts[10].findings} == {"base, stdlib"}


def test_every_check_is_answered_by_the_runs_of_its_figures() -> None:
    for claim in CLAIMS:
        for check in claim.checks:
            for name in claim.figures:
                there = {v for panel in FIGURES[name].panels for v in panel.variants}
                assert {check.variant, check.other} <= there, (claim.number, check, name)


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_names_variants_that_exist(figure: str) -> None:
    if figure == "family":
        pytest.importorskip("softmax_rnn.ops.systems")
    for panel in FIGURES[figure].panels:
        for variant in panel.variants:
            attention = DEMO.config(panel, variant, 0, {}).variant
            if variant in ATTENTIONS:
                assert may_name(variant, attention)  # of a run's folder, in tables
            elif not {**DEMO.conditions[panel.condition], **panel.fields}.get("layer") and (
                panel.width is None
            ):
                assert attention == resolve_layer(variant)


def test_our_own_claims_are_apart(tmp_path: Path) -> None:
    losses = {"softmax": 1.5, "norm": 1.5, "gate": 1.55}
    base, family = (runs_of(tmp_path / place, losses) for place in ("base", "family"))
    for name, loss in {"taylor:2+decay": 1.51, "forgetting": 1.4, "taylor:2": 1.7}.items():
        family[name] = {seed: fake_name(tmp_path / name, seed, loss) for seed in range(3)}
    verdicts = judge({("base", "stdlib"): base, ("family", "stdlib"): family}, DEMO)
    own = {v.claim.number: v for v in verdicts if v.claim.source == OWN}
    assert [own[number].outcome for number in (1, 2, 5)] == ["holds", "undecided", "holds"]
    assert {finding.where for finding in own[1].findings} == {"family, stdlib"}
    assert own[2].findings[0].outcome == "holds"  # taylor:2; the others were not run
    assert own[4].outcome == "not run"
    paper = [v for v in verdicts if v.claim.source == PAPER]
    assert paper[0].outcome == "holds"
    assert {finding.where for finding in paper[0].findings} == {"base, stdlib"}
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(rich_verdicts(verdicts))
    before, after = shown.export_text().split(OWN)
    assert PAPER in before
    assert "11. L2, RMS" in before
    assert " 1. A series of order 2 with a token decay is no worse than softmax." in after
    assert "taylor:2+decay no worse than softmax within 0.03" in after


def fake_name(root: Path, seed: int, loss: float) -> RunFolder:
    """A run for which only its losses count."""
    return made_up(root, "taylor:2", seed, loss)


@pytest.mark.parametrize(
    ("check", "accuracy", "outcome"),
    [
        (Check("norm", "no worse", "softmax", 0.02, "recall"), 0.99, "holds"),
        (Check("norm", "no worse", "softmax", 0.02, "recall"), 0.90, "fails"),
        (Check("norm", "worse", "softmax", 0.02, "recall"), 0.90, "holds"),
        (Check("norm", "worse", "softmax", 0.02, "recall"), 0.99, "fails"),
        (Check("norm", "solved", "norm", 0.01, "recall"), 0.995, "holds"),
        (Check("norm", "solved", "norm", 0.01, "recall"), 0.95, "fails"),
    ],
)
def test_a_check_of_recall(check: Check, accuracy: float, outcome: str, tmp_path: Path) -> None:
    """Losses say the opposite, and count for nothing."""
    task = {"corpus": "task:mqar", "block_size": 64}
    runs = {
        name: {seed: made_up(tmp_path, name, seed, loss, accuracy=right, **task) for seed in (0, 1)}
        for name, loss, right in (("softmax", 1.5 + accuracy, 0.99), ("norm", 1.5, accuracy))
    }
    finding = examine(check, runs, "recall, mqar")
    assert finding.outcome == outcome
    assert finding.difference is not None
    wrong = 1 - accuracy - (0 if check.kind == "solved" else 0.01)
    assert finding.difference.mean == pytest.approx(wrong, abs=0.005)


def test_claims_on_recall_are_judged_at_every_width(tmp_path: Path) -> None:
    """Windows have no claim, and softmax at its own width is judged, too."""
    task = {"corpus": "task:mqar", "block_size": 64}

    def runs(where: str, accuracies: dict[str, float]) -> dict[str, dict[int, RunFolder]]:
        return {
            name: {
                seed: made_up(tmp_path / where, name, seed, 1.0, accuracy=accuracy, **task)
                for seed in (0, 1)
            }
            for name, accuracy in accuracies.items()
        }

    found = {
        ("recall", "mqar"): runs("own", {"softmax": 1.0, "window:16": 0.1}),
        ("recall", "mqar-width2"): runs("2", {"softmax": 0.9, "taylor:1": 0.1, "taylor:2": 0.4}),
        ("recall", "mqar-width4"): runs("4", {"softmax": 1.0, "taylor:1": 0.6, "taylor:2": 0.9}),
    }
    verdicts = {v.claim.text: v for v in judge(found, DEMO) if "recall" in v.claim.figures}
    softmax = verdicts["Softmax recalls every pair, however narrow its queries and keys."]
    where = [", ".join(place) for place in found]
    more = [f"recall, mqar-width{width}" for width in (8, 16)]
    assert [finding.where for finding in softmax.findings] == [*where, *more]
    outcomes = ["holds", "fails", "holds", "not run", "not run"]
    assert [finding.outcome for finding in softmax.findings] == outcomes
    assert softmax.outcome == "fails"
    assert softmax.findings[1].found == "0.1002 wrong (seeds: 0.0999 to 0.1006)"
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(rich_verdicts(list(verdicts.values())))
    text = shown.export_text()
    assert re.search(r"taylor:1 in recall within 0.02 +holds +-0\.3\d* \[.*\] wrong +2 ", text)
    assert "of recall, they are of the share of wrong answers" in " ".join(text.split())
    powers = verdicts["Adding powers costs no recall."]
    ran = [finding for finding in powers.findings if finding.outcome != "not run"]
    assert [(str(f.check), f.where, f.outcome) for f in ran] == [
        ("taylor:2 no worse than taylor:1 in recall within 0.02", f"recall, mqar-width{w}", "holds")
        for w in (2, 4)
    ]


def test_a_claim_on_recall_needs_every_width(tmp_path: Path) -> None:
    """It does not hold before all runs are finished; a claim on text needs no further corpus."""
    task = {"corpus": "task:mqar", "block_size": 64}
    solved = [made_up(tmp_path, "softmax", seed, 1.0, accuracy=1.0, **task) for seed in (0, 1)]
    runs = {"softmax": dict(enumerate(solved))}
    for widths, outcome in (((2, 4), "undecided"), ((2, 4, 8, 16), "holds")):
        verdicts = judge({("recall", f"mqar-width{width}"): runs for width in widths}, DEMO)
        (softmax,) = (v for v in verdicts if v.claim.text.startswith("Softmax recalls every pair"))
        assert softmax.outcome == outcome
        assert len(softmax.findings) == 4
