"""The paper's figures and our own as data: which variants are trained side by side, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from softmax_rnn._utils.errors import unknown


class Own(NamedTuple):
    """An attention of a figure that is no variant: fields of its spec, and of its layer."""

    spec: Mapping[str, Any]
    layer: Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """Variants trained side by side under one condition.

    Attributes:
        title: the paper's name for it; if empty, the title of its corpus.
        variants: names, as ``compare`` takes them, or of ``ATTENTIONS``.
        corpus: key into the scale's corpora: ``pile``, ``slimpajama``, ``fineweb``, ``recall`` or a
            task.
        condition: key into the scale's conditions: ``base``, ``large`` (larger model), ``long``
            (longer sequence), ``family`` (smaller, so that many variants finish in an hour) or
            ``recall`` and ``task`` (small models for synthetic tasks) or ``both`` (small encoders).
        width: of queries and keys: index into the scale's widths; by default a head's.
    """

    title: str
    variants: tuple[str, ...]
    corpus: str = "fineweb"
    condition: str = "base"
    width: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A figure of the paper, or our own (``family``, ``gaps``).

    Attributes:
        name: for example ``figure4``.
        title: what the figure shows.
        panels: one per column of curves, or per line of final losses.
        kind: ``curves`` (loss against tokens, test above train), ``orders`` (final loss against
            the highest power), ``states`` (curves, and final loss against the size of the state),
            ``recall`` (accuracy against that size), ``gaps`` (test loss minus softmax's against
            tokens, with power laws), ``steps`` (final test loss minus softmax's, a row for each
            variant) or ``stability`` (final loss and loss spikes against the learning rate; a run
            may diverge).
        large: whether the figure is drawn larger, as in the appendix.
        sweep: a setting and its values, as ``--sweep`` takes them, which are tried unless the
            setting is given.
        by_family: whether the variants of a family (``taylor:2``, ``taylor:4``) have one value.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    kind: Literal["curves", "orders", "states", "recall", "gaps", "steps", "stability"] = "curves"
    large: bool = False
    sweep: str = ""
    by_family: bool = False

    def only(self, variants: Sequence[str]) -> Experiment:
        """The same figure with only these variants; empty panels are left out."""
        known = {variant for panel in self.panels for variant in panel.variants}
        for variant in variants:
            if variant not in known:
                raise unknown(f"variant of {self.name}", variant, known)
        kept = [
            replace(panel, variants=tuple(name for name in panel.variants if name in variants))
            for panel in self.panels
        ]
        return replace(self, panels=tuple(panel for panel in kept if panel.variants))


THREE = ("softmax", "norm", "gate")
LINEAR = ("linear_elu", "linear_relu", "linear_cosine")
# The paper has every power up to 10. Each point is a run and the curve is smooth, so fewer suffice.
ORDERS = (0, 1, 2, 3, 4, 6, 10)
SERIES = ("taylor", "taylor_elu", "taylor_relu", "taylor_cosine")
# Systems of related work and of this library as members of one formula; ``+decay`` is a forget gate
# per head and token (docs/related-systems.md).
FAMILY = (
    *("softmax", "norm", "forgetting"),
    *("taylor:2", "taylor:2+decay", "taylor_norm:2", "polynomial:2", "polynomial:2+decay"),
    *("linear_elu", "linear_elu+decay", "retnet", "mamba2", "gla"),
    *("power_retention:2", "based", "window_taylor:2"),
)
# Recall: orders and widths of queries and keys, in which the size of the state grows.
SERIES_OF_RECALL = ("taylor", "taylor_norm", "polynomial", "taylor_elu")
RECALL = (
    "softmax",
    *(
        f"{series}:{order}{decay}"
        for series in SERIES_OF_RECALL
        for decay in ("", "+decay")
        for order in (1, 2, 3, 4)
    ),
)
# Other tasks: what a decay is for, and what no sum of powers should solve.
TASKS = ("overwrite", "induction", "selective_copy", "parity", "s5")
_ON_TASKS = (
    *("softmax", "norm", "forgetting", "linear_elu", "linear_elu+decay"),
    *("taylor:2", "taylor:2+decay", "mamba2"),
)
# What looks both ways.
_ENCODERS = (
    *("softmax", "norm", "linear_elu", "linear_elu+decay"),
    *("taylor:2", "taylor:2+decay", "taylorshift"),
)
# The steps by which the paper's sequel builds up 2Mamba (docs/related-systems.md).
_LINEAR = {"series": "power", "order": 1, "feature_map": "relu", "scale": 1.0}
_FADING = {**_LINEAR, "decay": "token"}
_PLAIN = {"rotary": False}
_CONVOLVED = {**_PLAIN, "short_convolution": 2, "convolution_bias": True}
_SOFTPLUS = {**_CONVOLVED, "decay_rule": "softplus"}
ATTENTIONS: dict[str, Own] = {
    "linear": Own(_LINEAR, _PLAIN),
    "linear_norm": Own({**_LINEAR, "denominator": "none"}, {**_PLAIN, "merged_norm": True}),
    **{
        f"linear_convolution{width}": Own(_LINEAR, {**_CONVOLVED, "short_convolution": width})
        for width in (2, 3, 4)
    },
    "linear_convolution2_silu": Own(_LINEAR, {**_CONVOLVED, "convolution_activation": "swish"}),
    "linear_mamba_decay": Own(
        {**_FADING, "input_gate": True}, {**_CONVOLVED, "decay_rule": "time_step"}
    ),
    "linear_softplus": Own(_FADING, _SOFTPLUS),
    "linear_softplus_d": Own(_FADING, {**_SOFTPLUS, "skip": True, "skip_per_channel": True}),
    "linear_softplus_z": Own(
        {**_FADING, "output_gate": "after_norm"},
        {**_SOFTPLUS, "gate_activation": "swish", "gate_per_channel": True},
    ),
    "linear_softplus_dt": Own(
        {**_FADING, "input_gate": True}, {**_SOFTPLUS, "input_activation": "softplus"}
    ),
    "2mamba_norm": Own(
        {"series": "power", "order": 2, "decay": "token", "denominator": "none"},
        {**_SOFTPLUS, "merged_norm": True},
    ),
}
_WITHOUT_DECAY = ("softmax", *(name for name, own in ATTENTIONS.items() if "decay" not in own.spec))
_WITH_DECAY = (
    "softmax",
    *(name for name, own in ATTENTIONS.items() if "decay" in own.spec),
    *("2mamba", "2mamba_e", "mamba2"),
)
_WINDOWS = ("softmax", "window:16", "window:32", "window:48")
_DENOMINATORS = (
    *("softmax", "detached", "clamped", "length"),
    *("detached_gate", "gate_only", "gate"),
)
_GATES = ("softmax", "gate_only", "gate", "input_gate", "both_gates", "relu_gate", "length")
_NORMS = (
    *("softmax", "norm", "norm_l2_clamped", "norm_l2_length", "norm_rms"),
    *("norm_rms_length", "norm_layer_length", "norm_relu"),
)
# Variants of the claims that the demo scale fails to show; more tokens may.
_GAPS = (
    *("softmax", "norm", "gate", "length", "gate_only"),
    *("norm_rms", "norm_layer_length", "norm_l2_length"),
)
# The family's best and its rivals, for more tokens.
_FLAGSHIP = (
    *("softmax", "forgetting", "norm", "taylor:2", "taylor:2+decay", "polynomial:2+decay"),
    *("power_retention:2", "linear_elu+decay", "mamba2", "window_taylor:2"),
)
# Attentions of order 2, and softmax, with the same additions.
_SEARCHED = (
    *("softmax", "forgetting", "taylor:2+decay", "taylor_norm:2+decay"),
    *("polynomial:2+decay", "power_retention:2"),
)
_ADDITIONS: dict[str, Mapping[str, Any]] = {
    "as they are": {},
    "without rotary positions": {"rotary": False},
    "a convolution of 2": {"short_convolution": 2},
    "both": {"short_convolution": 2, "rotary": False},
}
# What replaces or helps the denominator, and exp with nothing in its place.
_UNSTABLE = (
    *("softmax", "norm", "gate", "length"),
    *("gate_only", "clamped", "detached", "linear_elu"),
)
_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
_TAMED: dict[str, Mapping[str, Any]] = {
    "clipping and warm-up": {"gradient_clip": 1.0},
    "clipping alone": {"gradient_clip": 1.0, "warmup_steps": 0},
    "warm-up alone": {"gradient_clip": 0.0},
    "neither": {"gradient_clip": 0.0, "warmup_steps": 0},
}

_FIGURE2 = Experiment(  # section 4.1, on three corpora
    "figure2",
    "Softmax and its two replacements",
    (
        Panel("", THREE, corpus="pile"),
        Panel("", THREE, corpus="slimpajama"),
        Panel("", THREE, corpus="fineweb"),
    ),
)
_FIGURE6 = Experiment(  # section 4.5
    "figure6",
    "Ablations",
    (Panel("denominator", _DENOMINATORS), Panel("gate", _GATES), Panel("norm", _NORMS)),
)

FIGURES: dict[str, Experiment] = {
    figure.name: figure
    for figure in (
        _FIGURE2,
        Experiment(  # section 4.2
            "figure3",
            "Scaling the model and the sequence",
            (
                Panel("larger model", THREE, condition="large"),
                Panel("longer sequence", THREE, condition="long"),
            ),
        ),
        Experiment(  # section 4.3
            "figure4", "Linear attention", (Panel("linear attention", (*THREE, *LINEAR)),)
        ),
        Experiment(  # section 4.4, appendix F
            "figure5",
            "Powers of the Taylor series",
            (
                Panel("softmax", ("softmax",)),
                *(Panel(series, tuple(f"{series}:{n}" for n in ORDERS)) for series in SERIES),
            ),
            kind="orders",
        ),
        _FIGURE6,
        replace(_FIGURE2, name="figure8", large=True),  # appendix G
        replace(_FIGURE6, name="figure9", large=True),
        Experiment(  # not in the paper
            "family",
            "One formula: decays, polynomials and windows",
            (Panel("the family", FAMILY, condition="family"),),
            kind="states",
        ),
        Experiment(  # not in the paper
            "gaps", "Gaps to softmax", (Panel("gaps", _GAPS),), kind="gaps"
        ),
        Experiment(  # not in the paper
            "flagship",
            "Order 2 with a forget gate, and its rivals",
            (Panel("flagship", _FLAGSHIP),),
            kind="states",
        ),
        Experiment(  # not in the paper
            "additions",
            "Order 2 and softmax with the same additions",
            tuple(
                Panel(title, _SEARCHED, fields={"layer": layer} if layer else {})
                for title, layer in _ADDITIONS.items()
            ),
            kind="steps",
        ),
        Experiment(  # not in the paper: what its remarks on loss spikes need
            "stability",
            "Loss and spikes against the learning rate",
            tuple(
                Panel(
                    title,
                    _UNSTABLE,
                    condition="stability",
                    fields={"learning_rate": rate, **fields},
                )
                for title, fields in _TAMED.items()
                for rate in _RATES
            ),
            kind="stability",
        ),
        Experiment(  # the paper's sequel
            "sequel",
            "2Mamba, step by step",
            (
                Panel("without a decay", _WITHOUT_DECAY),
                Panel("with a decay and a convolution of two", _WITH_DECAY),
            ),
            kind="steps",
        ),
        Experiment(  # not in the paper
            "tasks",
            "Synthetic tasks",
            tuple(Panel("", _ON_TASKS, corpus=task, condition="task") for task in TASKS),
        ),
        Experiment(  # not in the paper
            "bidirectional",
            "Encoders: hidden bytes, images of digits, nested lists",
            tuple(
                Panel("", _ENCODERS, corpus=corpus, condition="both")
                for corpus in ("fineweb", "digits", "listops")
            ),
        ),
        Experiment(  # not in the paper
            "recall",
            "Recall against the size of the state",
            (
                Panel("", _WINDOWS, corpus="recall", condition="recall"),
                *(
                    Panel("", RECALL, corpus="recall", condition="recall", width=width)
                    for width in range(4)
                ),
            ),
            kind="recall",
            sweep="learning_rate=1e-3,3.16e-3,1e-2,3.16e-2",  # zoology's: logspace(-3, -1.5, 4)
            by_family=True,
        ),
    )
}
