"""The paper's eleven claims and our own as data: checks on variants trained side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from softmax_rnn.experiments.figures import LINEAR, ORDERS, SERIES_OF_RECALL, THREE

# Whose claims: headings of the tables.
PAPER, SEQUEL, OWN = "The paper's claims", "The claims of its sequel", "Our own claims"
# Margins of the checks, in nats per token.
EQUAL, CLEAR, SLIGHT, NEAR = 0.03, 0.05, 0.1, 0.1


@dataclass(frozen=True)
class Check:
    """One comparison of a variant with another, by name.

    Kinds, with ``d`` the test loss of ``variant`` minus that of ``other``, or (``of`` is
    ``recall``) the share of wrong answers on a task:

    - ``equal``: ``|d| < margin`` (two one-sided tests at 5%, so the 90% interval counts).
    - ``worse``: ``d > margin``.
    - ``slightly worse``: ``0 < d < margin``.
    - ``better``: ``d < -margin``.
    - ``no worse``: ``d < margin`` (a one-sided test at 5%).
    - ``spikier``: more loss spikes in training, with every seed (:func:`count_spikes`).
    - ``solved``: a share of at most ``margin`` of ``variant``'s answers is wrong, with every seed.
    """

    variant: str
    kind: Literal["equal", "worse", "slightly worse", "better", "no worse", "spikier", "solved"]
    other: str
    margin: float = 0.0
    of: Literal["loss", "recall"] = "loss"

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
        if self.kind == "solved":
            return f"{self.variant} answers {1 - self.margin:g} of all questions"
        margin = f" by > {self.margin:g}" if self.margin else ""
        if self.kind in ("equal", "slightly worse", "no worse"):
            margin = f" within {self.margin:g}"
        joins = {"equal": "equal to", "spikier": "spikier than"}
        of = " in recall" if self.of == "recall" else ""
        join = joins.get(self.kind, f"{self.kind} than")
        return f"{self.variant} {join} {self.other}{of}{margin}"


@dataclass(frozen=True)
class Claim:
    """A sentence, the figures whose runs can decide it, and its checks.

    The source is ``PAPER``, ``SEQUEL`` or ``OWN``; each numbers its claims.
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
        ("figure2", "figure4", "stability"),
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
        ("figure6", "stability"),
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
_FAMILY_CLAIMS: tuple[tuple[str, tuple[Check, ...]], ...] = (
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
_RECALLED = 0.02  # share of answers


def _recalls(kind: Any, *pairs: tuple[str, str]) -> tuple[Check, ...]:
    return tuple(Check(a, kind, b, _RECALLED, "recall") for a, b in pairs)


# Each is checked at every width of queries and keys that its variants are trained with.
_RECALL_CLAIMS: tuple[tuple[str, tuple[Check, ...]], ...] = (
    (
        "Softmax recalls every pair, however narrow its queries and keys.",
        (Check("softmax", "solved", "softmax", 0.01, "recall"),),
    ),
    (
        "Adding powers costs no recall.",
        _recalls("no worse", *((f"taylor:{n + 1}", f"taylor:{n}") for n in (1, 2, 3))),
    ),
    (
        "A token decay costs no recall.",
        _recalls("no worse", *((f"{s}:2+decay", f"{s}:2") for s in SERIES_OF_RECALL)),
    ),
    (
        "The paper's norm in place of a row sum costs no recall.",
        _recalls("no worse", *((f"taylor_norm:{n}", f"taylor:{n}") for n in (2, 4))),
    ),
    (
        "Learned coefficients recall no less than Taylor's under the paper's norm.",
        _recalls("no worse", *((f"polynomial:{n}", f"taylor_norm:{n}") for n in (2, 4))),
    ),
    (
        "An elu map costs recall at every order.",
        _recalls("worse", *((f"taylor_elu:{n}", f"taylor:{n}") for n in (1, 2, 4))),
    ),
)
# Of the sequel: "2Mamba2Furious: Linear in complexity, competitive in accuracy" (2026).
_SEQUEL_CLAIMS: tuple[tuple[str, tuple[Check, ...]], ...] = (
    (
        "A convolution of two tokens helps linear attention; more tokens or silu add little.",
        (
            Check("linear_convolution2", "better", "linear", CLEAR),
            *_each(
                ("linear_convolution3", "linear_convolution4", "linear_convolution2_silu"),
                "equal", ("linear_convolution2",), CLEAR,
            ),
        ),
    ),
    (
        "A softplus decay helps more than Mamba-2's.",
        (
            Check("linear_softplus", "better", "linear_convolution2", CLEAR),
            Check("linear_softplus", "better", "linear_mamba_decay"),
        ),
    ),
    (
        "D, Z and a time step add little.",
        _each(
            ("linear_softplus_d", "linear_softplus_z", "linear_softplus_dt"),
            "equal", ("linear_softplus",), EQUAL,
        ),
    ),
    (
        "The square helps, and reaches softmax.",
        (
            Check("2mamba", "better", "linear_softplus"),
            Check("2mamba", "no worse", "softmax", EQUAL),
            Check("2mamba", "better", "mamba2"),
        ),
    ),
    (
        "Exp in place of the square is no worse than softmax.",
        _each(["2mamba_e"], "no worse", ["softmax"], EQUAL),
    ),
)  # fmt: skip
_OWN_CLAIMS = (
    *((text, ("family",), checks) for text, checks in _FAMILY_CLAIMS),
    *((text, ("recall",), checks) for text, checks in _RECALL_CLAIMS),
)
CLAIMS = (
    *(Claim(PAPER, number, *claim) for number, claim in enumerate(_CLAIMS, start=1)),
    *(
        Claim(SEQUEL, number, text, ("sequel",), checks)
        for number, (text, checks) in enumerate(_SEQUEL_CLAIMS, start=1)
    ),
    *(Claim(OWN, number, *claim) for number, claim in enumerate(_OWN_CLAIMS, start=1)),
)
