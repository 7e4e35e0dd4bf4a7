"""The paper's eleven claims and our own as data, and a verdict on each from the finished runs.

A claim is a list of checks on pairs of variants trained under the same conditions. Differences of
test loss are paired by seed and test block (``paired_difference``). A check holds or fails if its
confidence interval shows it. It is undecided if the interval allows both, or covers a single seed.
A claim holds if all its checks hold, and fails if one fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from softmax_rnn.experiments.figures import FIGURES, LINEAR, ORDERS, THREE
from softmax_rnn.experiments.scales import Scale
from softmax_rnn.report.statistics import Difference, paired_runs
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.metrics import loss_spikes

Outcome = Literal["holds", "fails", "undecided", "not run"]
# Whose claims: headings of the tables.
PAPER, OWN = "The paper's claims", "Our own claims"
# Margins of the checks, in nats per token.
EQUAL, CLEAR, SLIGHT, NEAR = 0.03, 0.05, 0.1, 0.1
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Check:
    """One comparison of a variant with another, by name.

    Kinds, with ``d`` the test loss of ``variant`` minus that of ``other``:

    - ``equal``: ``|d| < margin`` (two one-sided tests at 5%, so the 90% interval counts).
    - ``worse``: ``d > margin``.
    - ``slightly worse``: ``0 < d < margin``.
    - ``better``: ``d < -margin``.
    - ``no worse``: ``d < margin`` (a one-sided test at 5%).
    - ``spikier``: more loss spikes in training, over all seeds.
    """

    variant: str
    kind: Literal["equal", "worse", "slightly worse", "better", "no worse", "spikier"]
    other: str
    margin: float = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """The open interval that ``d`` must be in."""
        return {
            "equal": (-self.margin, self.margin),
            "worse": (self.margin, math.inf),
            "slightly worse": (0, self.margin),
            "better": (-math.inf, -self.margin),
            "no worse": (-math.inf, self.margin),
        }[self.kind]

    def __str__(self) -> str:
        """The check in words, with its margin."""
        margin = f" by > {self.margin:g}" if self.margin else ""
        if self.kind in ("equal", "slightly worse", "no worse"):
            margin = f" within {self.margin:g}"
        joins = {"equal": "equal to", "spikier": "spikier than"}
        return f"{self.variant} {joins.get(self.kind, f'{self.kind} than')} {self.other}{margin}"


@dataclass(frozen=True)
class Claim:
    """A sentence, the figures whose runs can decide it, and its checks.

    The source is ``PAPER`` or ``OWN``; each numbers its claims.
    """

    source: str
    number: int
    text: str
    figures: tuple[str, ...]
    checks: tuple[Check, ...]


def _each(
    variants: Sequence[str], kind: Any, others: Sequence[str], margin: float = 0.0
) -> tuple[Check, ...]:
    return tuple(Check(v, kind, other, margin) for v in variants for other in others)


_EQUAL = _each(["norm"], "equal", ["softmax"], EQUAL)
_SLIGHTLY_WORSE = _each(["gate"], "slightly worse", ["softmax"], SLIGHT)
_LAST = ORDERS[-1]
_STEPS = ((0, 1), (1, 2), (2, 4), (4, _LAST))  # of the highest power
_GROWING = (f"taylor_elu:{_LAST}", f"taylor_relu:{_LAST}")
_NORMS = ("norm", "norm_rms", "norm_layer_length", "norm_l2_length")

# The paper's sentence, the figures whose runs decide it, and its checks.
_CLAIMS: tuple[tuple[str, tuple[str, ...], tuple[Check, ...]], ...] = (
    ("Norm's loss equals softmax's.", ("figure2", "figure4"), _EQUAL),
    (
        "Gate is slightly worse, and spikes at times.",
        ("figure2", "figure4"),
        (*_SLIGHTLY_WORSE, Check("gate", "spikier", "softmax")),
    ),
    (
        "Both hold with a larger model and a longer sequence.",
        ("figure3",),
        (*_EQUAL, *_SLIGHTLY_WORSE),
    ),
    (
        "Every linear variant is clearly worse than softmax, norm and gate.",
        ("figure4",),
        _each(LINEAR, "worse", THREE, CLEAR),
    ),
    (
        f"Adding powers moves linear towards softmax; by n = {_LAST} the series matches it.",
        ("figure5",),
        (
            *(Check(f"taylor:{high}", "better", f"taylor:{low}") for low, high in _STEPS),
            Check(f"taylor:{_LAST}", "equal", "softmax", EQUAL),
        ),
    ),
    (
        "Powers help elu and relu maps but never reach softmax; they do nothing for cosine.",
        ("figure5",),
        (
            *(Check(name, "better", name.replace(f":{_LAST}", ":1")) for name in _GROWING),
            *_each(_GROWING, "worse", ["softmax"], EQUAL),
            Check(f"taylor_cosine:{_LAST}", "equal", "taylor_cosine:1", EQUAL),
        ),
    ),
    (
        "Detaching the denominator hurts much.",
        ("figure6",),
        _each(["detached"], "worse", ["softmax", "clamped"], NEAR),
    ),
    (
        "Length division alone is near softmax but unstable; a gate stabilises it somewhat.",
        ("figure6",),
        (
            Check("length", "equal", "softmax", NEAR),
            *_each(["length"], "spikier", ["softmax", "gate"]),
        ),
    ),
    (
        "A gate without length division is poor on test.",
        ("figure6",),
        _each(["gate_only"], "worse", ["gate", "softmax"], CLEAR),
    ),
    (
        "ReLU in place of exp hurts, with or without gate or norm.",
        ("figure6",),
        (Check("relu_gate", "worse", "gate", CLEAR), Check("norm_relu", "worse", "norm", CLEAR)),
    ),
    (
        "L2, RMS, LayerNorm and L2 with length division all match softmax.",
        ("figure6",),
        _each(_NORMS, "equal", ["softmax"], EQUAL),
    ),
)
_DECAYED = ("taylor:2", "polynomial:2", "linear_elu")
_FIRST_ORDER = ("linear_elu+decay", "retnet", "mamba2", "gla")
_OWN_CLAIMS: tuple[tuple[str, tuple[Check, ...]], ...] = (
    (
        "A series of order 2 with a token decay is no worse than softmax.",
        _each(["taylor:2+decay"], "no worse", ["softmax"], EQUAL),
    ),
    (
        "A token decay lowers the loss of every finite series.",
        tuple(Check(f"{name}+decay", "better", name) for name in _DECAYED),
    ),
    (
        "With a decay, order 2 is still better than order 1.",
        _each(["taylor:2+decay"], "better", _FIRST_ORDER),
    ),
    (
        "Learned coefficients are no worse than Taylor's under the paper's norm.",
        _each(["polynomial:2"], "no worse", ["taylor_norm:2"], EQUAL),
    ),
    (
        "Softmax with a decay is no worse than softmax.",
        _each(["forgetting"], "no worse", ["softmax"], EQUAL),
    ),
    (
        "Exp inside a window and a series outside it is better than the series alone.",
        _each(["window_taylor:2"], "better", ["taylor:2"]),
    ),
)
CLAIMS = (
    *(Claim(PAPER, number, *claim) for number, claim in enumerate(_CLAIMS, start=1)),
    *(
        Claim(OWN, number, text, ("family",), checks)
        for number, (text, checks) in enumerate(_OWN_CLAIMS, start=1)
    ),
)


@dataclass(frozen=True)
class Finding:
    """The result of one check under one condition.

    Attributes:
        check: the check.
        where: the condition and the corpus.
        outcome: ``holds``, ``fails``, ``undecided`` or ``not run``.
        seeds: number of seeds that both variants share.
        difference: difference of the test losses with its 95% interval; ``None`` if not run.
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
        return "" if self.difference is None else str(self.difference)


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
        wanted = {scale.place(panel) for name in claim.figures for panel in FIGURES[name].panels}
        places = [place for place in found if place in wanted] or [("", "")]
        findings = tuple(
            examine(check, found.get(place, {}), ", ".join(place).strip(", "))
            for place in places
            for check in claim.checks
        )
        verdicts.append(Verdict(claim, findings))
    return verdicts


def examine(check: Check, runs: Runs, where: str) -> Finding:
    """Decide a check from the runs of one condition."""
    variant, other = runs.get(check.variant, {}), runs.get(check.other, {})
    shared = sorted(set(variant) & set(other))
    if not shared:
        return Finding(check, where, "not run")
    difference = paired_runs(variant, other, shared, CONFIDENCE)
    spikes, reason = None, "the interval allows both"
    if check.kind == "spikier":
        spikes = _spikes(variant, shared), _spikes(other, shared)
        # Without any spike the check is undecided.
        outcome = _outcome(spikes[0] > spikes[1], spikes[0] <= spikes[1] and spikes != (0, 0))
        reason = "no spikes"
    else:
        low, high = check.bounds
        # One-sided tests at 5% are a 90% interval.
        one_sided = check.kind in ("equal", "no worse")
        level = 2 * CONFIDENCE - 1 if one_sided else CONFIDENCE
        tested = paired_runs(variant, other, shared, level)
        outcome = _outcome(
            low < tested.low and tested.high < high,
            difference.high <= low or difference.low >= high,
        )
    if len(shared) == 1:  # the interval does not cover other seeds
        outcome, reason = "undecided", "one seed"
    reason = reason if outcome == "undecided" else ""
    return Finding(check, where, outcome, len(shared), difference, spikes, reason)


def _spikes(runs: Mapping[int, RunFolder], seeds: Sequence[int]) -> int:
    return sum(loss_spikes(runs[seed].metrics.loss) for seed in seeds)


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
