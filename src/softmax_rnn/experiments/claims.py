"""The paper's eleven claims as data, and a verdict for each from the runs that are there.

A claim is a list of checks on pairs of variants trained under the same conditions. Differences of
test loss are paired by seed and test block (``paired_difference``). A check holds or fails when its
interval says so, and is undecided when the interval allows both, or covers one seed alone; a claim
holds when all its checks do, and fails when one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.markup import escape
from rich.table import Table

from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.figures.figure4 import LINEAR
from softmax_rnn.experiments.figures.figure5 import ORDERS
from softmax_rnn.report.statistics import Difference, paired_difference
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.metrics import loss_spikes

Outcome = Literal["holds", "fails", "undecided", "not run"]
# Nats per token: what counts as equal, and as clear.
EQUAL, CLEAR, SLIGHT, NEAR = 0.03, 0.05, 0.1, 0.1
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Check:
    """One comparison of a variant with another, by name.

    Kinds, with ``d`` the test loss of ``variant`` minus that of ``other``:

    - ``equal``: ``|d| < margin`` (two one-sided tests at 5%: the 90% interval lies within).
    - ``worse``: ``d > margin``.
    - ``slightly worse``: ``0 < d < margin``.
    - ``better``: ``d < -margin``.
    - ``spikier``: more loss spikes in training, over all seeds.
    """

    variant: str
    kind: Literal["equal", "worse", "slightly worse", "better", "spikier"]
    other: str
    margin: float = 0.0

    def __str__(self) -> str:
        """In words, the margin where it matters."""
        margin = f" by > {self.margin:g}" if self.margin else ""
        if self.kind in ("equal", "slightly worse"):
            margin = f" within {self.margin:g}"
        joins = {"equal": "equal to", "spikier": "spikier than"}
        return f"{self.variant} {joins.get(self.kind, f'{self.kind} than')} {self.other}{margin}"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, the figures whose runs decide it, and its checks."""

    number: int
    text: str
    figures: tuple[str, ...]
    checks: tuple[Check, ...]


def _each(
    variants: Sequence[str], kind: Any, others: Sequence[str], margin: float = 0.0
) -> tuple[Check, ...]:
    return tuple(Check(v, kind, other, margin) for v in variants for other in others)


_REPLACED = (
    *_each(["norm"], "equal", ["softmax"], EQUAL),
    *_each(["gate"], "slightly worse", ["softmax"], SLIGHT),
)
_FIRST, _LAST = 1, ORDERS[-1]

CLAIMS: tuple[Claim, ...] = (
    Claim(
        1,
        "Norm's loss equals softmax's.",
        ("figure2", "figure4"),
        _each(["norm"], "equal", ["softmax"], EQUAL),
    ),
    Claim(
        2,
        "Gate is slightly worse, and spikes at times.",
        ("figure2", "figure4"),
        (
            Check("gate", "slightly worse", "softmax", SLIGHT),
            Check("gate", "spikier", "softmax"),
        ),
    ),
    Claim(3, "Both hold with a larger model and a longer sequence.", ("figure3",), _REPLACED),
    Claim(
        4,
        "Every linear variant is clearly worse than softmax, norm and gate.",
        ("figure4",),
        _each(LINEAR, "worse", ["softmax", "norm", "gate"], CLEAR),
    ),
    Claim(
        5,
        f"Adding powers moves linear towards softmax; by n = {_LAST} the series matches it.",
        ("figure5",),
        (
            *(
                Check(f"taylor:{high}", "better", f"taylor:{low}")
                for low, high in ((0, 1), (1, 2), (2, 4), (4, _LAST))
            ),
            Check(f"taylor:{_LAST}", "equal", "softmax", EQUAL),
        ),
    ),
    Claim(
        6,
        "Powers help elu and relu maps but never reach softmax; they do nothing for cosine.",
        ("figure5",),
        (
            *(
                Check(f"{name}:{_LAST}", "better", f"{name}:{_FIRST}")
                for name in ("taylor_elu", "taylor_relu")
            ),
            *_each([f"taylor_elu:{_LAST}", f"taylor_relu:{_LAST}"], "worse", ["softmax"], EQUAL),
            Check(f"taylor_cosine:{_LAST}", "equal", f"taylor_cosine:{_FIRST}", EQUAL),
        ),
    ),
    Claim(
        7,
        "Detaching the denominator hurts much.",
        ("figure6",),
        _each(["detached"], "worse", ["softmax", "clamped"], NEAR),
    ),
    Claim(
        8,
        "Length division alone is near softmax but unstable; a gate stabilises it somewhat.",
        ("figure6",),
        (
            Check("length", "equal", "softmax", NEAR),
            Check("length", "spikier", "softmax"),
            Check("length", "spikier", "gate"),
        ),
    ),
    Claim(
        9,
        "A gate without length division is poor on test.",
        ("figure6",),
        _each(["gate_only"], "worse", ["gate", "softmax"], CLEAR),
    ),
    Claim(
        10,
        "ReLU in place of exp hurts, with or without gate or norm.",
        ("figure6",),
        (
            Check("relu_gate", "worse", "gate", CLEAR),
            Check("norm_relu", "worse", "norm", CLEAR),
        ),
    ),
    Claim(
        11,
        "L2, RMS, LayerNorm and L2 with length division all match softmax.",
        ("figure6",),
        _each(
            ["norm", "norm_rms", "norm_layer_length", "norm_l2_length"], "equal", ["softmax"], EQUAL
        ),
    ),
)


@dataclass(frozen=True)
class Finding:
    """What the runs say of one check under one condition.

    Attributes:
        check: what was asked.
        where: the panel's condition and corpus.
        outcome: ``holds``, ``fails``, ``undecided`` or ``not run``.
        seeds: number of seeds that both variants share.
        difference: of the test losses, with its 95% interval; ``None`` where not run.
        spikes: of ``variant`` and of ``other``, over the shared seeds; ``None`` for other kinds.
        reason: why it is undecided.
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
        """What was measured, in words."""
        if self.spikes is not None:
            return "{} and {} spikes".format(*self.spikes)
        return "" if self.difference is None else str(self.difference)


@dataclass(frozen=True)
class Verdict:
    """A claim with its findings."""

    claim: Claim
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        """All hold, one fails, or neither; not run if nothing was."""
        outcomes = {finding.outcome for finding in self.findings}
        if outcomes <= {"not run"}:
            return "not run"
        if "fails" in outcomes:
            return "fails"
        return "holds" if outcomes == {"holds"} else "undecided"


# Runs of one condition: variant -> seed -> folder.
Runs = Mapping[str, Mapping[int, RunFolder]]


def judge(conditions: Mapping[tuple[str, str], Runs]) -> list[Verdict]:
    """A verdict on every claim.

    Args:
        conditions: finished runs by (condition, corpus label), then variant and seed.
    """
    verdicts = []
    for claim in CLAIMS:
        wanted = {panel.condition for name in claim.figures for panel in FIGURES[name].panels}
        places = [place for place in conditions if place[0] in wanted] or [("", "")]
        findings = tuple(
            examine(check, conditions.get(place, {}), ", ".join(place).strip(", "))
            for place in places
            for check in claim.checks
        )
        verdicts.append(Verdict(claim, findings))
    return verdicts


def examine(check: Check, runs: Runs, where: str) -> Finding:
    """What the runs of one condition say of a check."""
    variant, other = runs.get(check.variant, {}), runs.get(check.other, {})
    shared = sorted(set(variant) & set(other))
    if not shared:
        return Finding(check, where, "not run")
    losses = _losses(variant, shared), _losses(other, shared)
    difference = paired_difference(*losses, confidence=CONFIDENCE)
    spikes, reason = None, "the interval allows both"
    if check.kind == "spikier":
        counts = [
            sum(loss_spikes(of[seed].metrics.loss) for seed in shared) for of in (variant, other)
        ]
        spikes = (counts[0], counts[1])
        # Counts of a few events decide little; none at all decides nothing.
        outcome = _outcome(spikes[0] > spikes[1], spikes[0] <= spikes[1] and spikes != (0, 0))
        reason = "no spikes"
    else:
        inner = paired_difference(*losses, confidence=2 * CONFIDENCE - 1)
        outcome = _DECIDE[check.kind](difference, inner, check.margin)
    if len(shared) == 1:  # another seed may say otherwise
        outcome, reason = "undecided", "one seed"
    reason = reason if outcome == "undecided" else ""
    return Finding(check, where, outcome, len(shared), difference, spikes, reason)


def _losses(seeds: Mapping[int, RunFolder], shared: Sequence[int]) -> NDArray[np.float64]:
    return np.stack([seeds[seed].test_losses for seed in shared])


def _outcome(holds: bool, fails: bool) -> Outcome:
    return "holds" if holds else "fails" if fails else "undecided"


# From the 95% interval, the 90% one (for two one-sided tests at 5%) and the margin.
_DECIDE: dict[str, Callable[[Difference, Difference, float], Outcome]] = {
    "equal": lambda d, inner, margin: _outcome(
        -margin < inner.low and inner.high < margin, d.low >= margin or d.high <= -margin
    ),
    "worse": lambda d, _, margin: _outcome(d.low > margin, d.high <= margin),
    "better": lambda d, _, margin: _outcome(d.high < -margin, d.low >= -margin),
    "slightly worse": lambda d, _, margin: _outcome(
        d.low > 0 and d.high < margin, d.high <= 0 or d.low >= margin
    ),
}


def verdict_table(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """One row a finding, as plain data; numbers that are not there, or not finite, are ``None``."""
    return [
        {
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
    if difference is None:
        return dict.fromkeys(("difference", "low", "high", "interval_over"))
    values = {"difference": difference.mean, "low": difference.low, "high": difference.high}
    finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
    return {**finite, "interval_over": difference.over}


_COLORS = {"holds": "green", "fails": "red", "undecided": "yellow", "not run": "dim"}


def rich_verdicts(verdicts: Sequence[Verdict]) -> Table:
    """The verdicts for the terminal: a claim, and below it what each check found."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("claim", "verdict", "difference [95% interval]", "seeds", "where"):
        right = column in ("difference [95% interval]", "seeds")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for verdict in verdicts:
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
