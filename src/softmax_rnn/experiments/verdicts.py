"""A verdict on every claim, from the finished runs.

Differences of test loss, or of the share of wrong answers on a task, are paired by seed and test
block (``paired_difference``). A check holds or fails if its confidence interval shows it. It is
undecided if the interval allows both, or covers a single seed. A claim holds if all its checks
hold, and fails if one fails. A claim about widths of queries and keys needs every width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import numpy as np
from rich.markup import escape
from rich.table import Table

from softmax_rnn.experiments.claims import CLAIMS, Check, Claim
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.scales import Scale
from softmax_rnn.report.statistics import Difference, Measure, paired_runs
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.metrics import loss_spikes

Outcome = Literal["holds", "fails", "undecided", "not run"]
CONFIDENCE = 0.95
UNITS = (
    "Differences are of test loss, in nats per token; of recall, they are of the share of wrong "
    "answers."
)
_MEASURES: dict[str, Measure] = {"loss": "test_losses", "recall": "test_errors"}


@dataclass(frozen=True)
class Finding:
    """The result of one check under one condition.

    Attributes:
        check: the check.
        where: the condition and the corpus.
        outcome: ``holds``, ``fails``, ``undecided`` or ``not run``.
        seeds: number of seeds that both variants share.
        difference: difference of the test losses or errors with its 95% interval; of kind
            ``solved`` the mean, least and largest error of the seeds; ``None`` if not run.
        spikes: loss spikes of ``variant`` and of ``other`` over the shared seeds; ``None`` unless
            the check is of kind ``spikier``.
        reason: why the check is undecided.
    """

    check: Check
    where: str
    outcome: Outcome
    seeds: int = 0
    difference: Difference | None = None
    spikes: tuple[int, int] | None = None
    reason: str = ""

    @property
    def found(self) -> str:
        """The measurement in words."""
        if self.spikes is not None:
            return "{} and {} spikes".format(*self.spikes)
        if self.difference is None:
            return ""
        if self.check.kind == "solved":
            mean, low, high, _ = astuple(self.difference)
            return f"{mean:.4f} wrong (seeds: {low:.4f} to {high:.4f})"
        return f"{self.difference}{' wrong' if self.check.of == 'recall' else ''}"


@dataclass(frozen=True)
class Verdict:
    """A claim with its findings."""

    claim: Claim
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        """``holds`` if all checks hold, ``fails`` if one fails, else ``undecided``."""
        outcomes = {finding.outcome for finding in self.findings}
        if outcomes <= {"not run"}:
            return "not run"
        if "fails" in outcomes:
            return "fails"
        return "holds" if outcomes == {"holds"} else "undecided"


# Runs of one condition: variant -> seed -> folder.
Runs = Mapping[str, Mapping[int, RunFolder]]


def judge(found: Mapping[tuple[str, str], Runs], scale: Scale) -> list[Verdict]:
    """A verdict on every claim.

    Args:
        found: finished runs of a scale by (condition, corpus label), then variant and seed.
        scale: that scale.
    """
    verdicts = []
    for claim in CLAIMS:
        trained: dict[tuple[str, str], set[str]] = {}
        needed, unsteady = list(found), []
        for panel in (panel for name in claim.figures for panel in FIGURES[name].panels):
            place = scale.place(panel)
            if panel.condition == "stability":
                unsteady.append(found.get(place, {}))
                continue
            trained.setdefault(place, set()).update(panel.variants)
            if panel.width is not None and place not in needed:
                needed.append(place)
        losses = [check for check in claim.checks if check.kind != "spikier"]
        compared = [
            examine(check, found.get(place, {}), ", ".join(place))
            for place in needed
            for check in losses
            if {check.variant, check.other} <= trained.get(place, set())
        ]
        findings = (
            *(compared or (examine(check, {}, "") for check in losses)),
            *(count_spikes(check, unsteady) for check in claim.checks if check.kind == "spikier"),
        )
        verdicts.append(Verdict(claim, findings))
    return verdicts


def examine(check: Check, runs: Runs, where: str) -> Finding:
    """Decide a check from the runs of one condition."""
    variant, other = runs.get(check.variant, {}), runs.get(check.other, {})
    shared = sorted(set(variant) & set(other))
    if not shared:
        return Finding(check, where, "not run")
    measure = _MEASURES[check.of]
    difference = paired_runs(variant, other, shared, CONFIDENCE, measure)
    reason = "the interval allows both"
    if check.kind == "solved":
        errors = [1 - run.summary["test_accuracy"] for run in variant.values()]
        solved = [error <= check.margin for error in errors]
        outcome, reason = _outcome(all(solved), not any(solved)), "some seeds only"
        difference = Difference(float(np.mean(errors)), min(errors), max(errors), "seeds")
    else:
        low, high = check.bounds
        # One-sided tests at 5% are a 90% interval.
        one_sided = check.kind in ("equal", "no worse")
        level = 2 * CONFIDENCE - 1 if one_sided else CONFIDENCE
        tested = paired_runs(variant, other, shared, level, measure)
        outcome = _outcome(
            low < tested.low and tested.high < high,
            difference.high <= low or difference.low >= high,
        )
    if len(shared) == 1:  # the interval does not cover other seeds
        outcome, reason = "undecided", "one seed"
    reason = reason if outcome == "undecided" else ""
    return Finding(check, where, outcome, len(shared), difference, None, reason)


def count_spikes(check: Check, places: Sequence[Runs]) -> Finding:
    """Decide a check of kind ``spikier`` from the runs of several conditions.

    It holds if ``variant`` has more spikes with every seed, and fails if it has with none. Spikes
    are counted under the conditions in which both have finished. Without any spike the check is
    undecided.
    """
    counts: dict[int, tuple[int, int]] = {}
    for runs in places:
        variant, other = runs.get(check.variant, {}), runs.get(check.other, {})
        for seed in sorted(set(variant) & set(other)):
            more, less = (loss_spikes(each[seed].metrics.loss) for each in (variant, other))
            before = counts.get(seed, (0, 0))
            counts[seed] = before[0] + more, before[1] + less
    where = "stability, all settings"
    if not counts:
        return Finding(check, where, "not run")
    spikes = sum(a for a, _ in counts.values()), sum(b for _, b in counts.values())
    wins = [more > less for more, less in counts.values()]
    outcome, reason = _outcome(all(wins), not any(wins) and spikes != (0, 0)), "some seeds only"
    reason = "no spikes" if spikes == (0, 0) else reason
    if len(counts) == 1:
        outcome, reason = "undecided", "one seed"
    reason = reason if outcome == "undecided" else ""
    return Finding(check, where, outcome, len(counts), None, spikes, reason)


def _outcome(holds: bool, fails: bool) -> Outcome:
    return "holds" if holds else "fails" if fails else "undecided"


def verdict_table(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """One row per finding, as plain data; missing and infinite numbers are ``None``."""
    return [
        {
            "source": verdict.claim.source,
            "claim": verdict.claim.number,
            "text": verdict.claim.text,
            "verdict": verdict.outcome,
            "check": str(finding.check),
            "where": finding.where,
            "outcome": finding.outcome,
            "reason": finding.reason,
            "seeds": finding.seeds,
            **_numbers(finding.difference),
            "spikes": finding.spikes,
            "found": finding.found,
        }
        for verdict in verdicts
        for finding in verdict.findings
    ]


def _numbers(difference: Difference | None) -> dict[str, float | str | None]:
    names = ("difference", "low", "high", "interval_over")
    values = (None,) * len(names) if difference is None else astuple(difference)
    finite = (None if value in (-math.inf, math.inf) else value for value in values)
    return dict(zip(names, finite, strict=True))


_COLORS = {"holds": "green", "fails": "red", "undecided": "yellow", "not run": "dim"}


def rich_verdicts(verdicts: Sequence[Verdict]) -> Table:
    """The verdicts for the terminal: each claim, followed by its checks."""
    columns = ("claim", "verdict", "difference [95% interval]", "seeds", "where")
    table = terminal_table(columns, left=("claim", "verdict", "where"))
    table.caption = UNITS
    source = None
    for verdict in verdicts:
        if verdict.claim.source != source:
            source = verdict.claim.source
            table.add_section()
            table.add_row(f"[bold]{source}[/bold]")
        table.add_row(
            f"[bold]{verdict.claim.number:2}. {verdict.claim.text}[/bold]",
            _colored(verdict.outcome),
            *("", ""),
            ", ".join(verdict.claim.figures),
        )
        for finding in verdict.findings if verdict.outcome != "not run" else ():
            table.add_row(
                f"      {finding.check}",
                _colored(finding.outcome, finding.reason),
                escape(finding.found),
                str(finding.seeds or ""),
                finding.where,
            )
    return table


def _colored(outcome: Outcome, reason: str = "") -> str:
    return f"[{_COLORS[outcome]}]{outcome}{reason and f': {reason}'}[/]"
