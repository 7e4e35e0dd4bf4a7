"""The scales at which a figure can be reproduced: a laptop, one GPU, the paper's cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from softmax_rnn.experiments.figures import ATTENTIONS, Panel
from softmax_rnn.training.config import PRESETS, RunConfig


@dataclass(frozen=True)
class Corpus:
    """A corpus: its name in folder names, its title, and its settings."""

    label: str
    title: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """The ``RunConfig`` settings behind the conditions and corpora of panels.

    Attributes:
        name: name of the scale.
        about: one line for the command's help.
        base: settings of every run.
        conditions: further settings by condition.
        corpora: corpora by the name in a panel.
        widths: of queries and keys, in the panels that have one.
        best: a setting, of which each variant has its best value; by default none.
    """

    name: str
    about: str
    base: Mapping[str, Any]
    conditions: Mapping[str, Mapping[str, Any]]
    corpora: Mapping[str, Corpus]
    widths: Sequence[int] = (8, 16, 32, 64)
    best: str = ""

    def with_best(self, setting: str) -> Scale:
        """The same scale, where each variant has its best value of a setting."""
        return replace(self, best=setting)

    @property
    def folder(self) -> str:
        """The name of the folder of its runs."""
        return f"{self.name}-{self.best}" if self.best else self.name

    @property
    def words(self) -> str:
        """Its name in titles."""
        best = f", the best {self.best.replace('_', ' ')} of each" if self.best else ""
        return f"{self.name} scale{best}"

    def config(self, panel: Panel, variant: str, seed: int, fields: Mapping[str, Any]) -> RunConfig:
        """The configuration of a run; ``fields`` override the scale's settings.

        Raises:
            ValueError: for a field that is unknown, or that has an option of its own.
        """
        for name, instead in (("attention", "--variants"), ("seed", "--seeds")):
            if name in fields:
                raise ValueError(f"{name} cannot be set here: use {instead}.")
        for name in panel.fields:
            if name in fields:
                raise ValueError(f"{name} cannot be set here: it is what {panel.title!r} varies.")
        settings = {
            **self.base,
            **self.conditions[panel.condition],
            **self.corpora[panel.corpus].fields,
            **panel.fields,
            **fields,
        }
        if panel.width is not None:
            settings["layer"] = {**settings.get("layer", {}), "qk_dim": self.widths[panel.width]}
        attention: Any = variant
        if variant in ATTENTIONS:
            attention = dict(ATTENTIONS[variant].spec)
            settings["layer"] = {**settings.get("layer", {}), **ATTENTIONS[variant].layer}
        return RunConfig.from_dict({**settings, "attention": attention, "seed": seed})

    def place(self, panel: Panel) -> tuple[str, str]:
        """The condition and corpus of a panel's runs, with their own settings; figures share them.

        For example ``base``, ``stdlib``; and ``recall``, ``mqar-width8``.
        """
        own = (f"-{name}{value:g}" for name, value in self._own(panel).items())
        return panel.condition, self.corpora[panel.corpus].label + "".join(own)

    def title(self, panel: Panel) -> str:
        """The title of a panel's corpus, with its own settings."""
        own = (f", {name.replace('_', ' ')} {value:g}" for name, value in self._own(panel).items())
        return self.corpora[panel.corpus].title + "".join(own)

    def _own(self, panel: Panel) -> dict[str, float]:
        """A panel's own settings."""
        width = {} if panel.width is None else {"width": self.widths[panel.width]}
        fields = {**panel.fields}
        return {**width, **fields.pop("layer", {}), **fields}

    def folder_name(self, panel: Panel) -> str:
        """The name of the folder of a panel's runs: ``base-fineweb``."""
        return "-".join(self.place(panel))


# The paper's corpora. The presets set test share and tokenizer; SlimPajama has its own test split.
_PILE = Corpus("pile", "The Pile", {"corpus": "hf:gmongaras/EleutherAI_the_pile_deduplicated"})
_SLIMPAJAMA = Corpus(
    "slimpajama", "SlimPajama", {"corpus": "hf:gmongaras/SlimPajama-627B_Reupload"}
)
_FINEWEB = Corpus("fineweb", "FineWeb", {"corpus": "hf:HuggingFaceFW/fineweb@CC-MAIN-2024-51"})
_WEB = {"pile": _PILE, "slimpajama": _SLIMPAJAMA, "fineweb": _FINEWEB}
# Corpora that need no network; most figures are on FineWeb, here on the standard library.
_INSTALLED = {
    "pile": Corpus("torch-headers", "PyTorch's C++ headers", {"corpus": "torch-headers"}),
    "slimpajama": Corpus("docstrings", "Docstrings", {"corpus": "docstrings"}),
    "fineweb": Corpus("stdlib", "Python's standard library", {"corpus": "stdlib"}),
    "recall": Corpus(
        "mqar", "16 pairs in 64 tokens", {"corpus": "task:mqar?pairs=16", "block_size": 64}
    ),
}
# Zoology's settings, lengths x pairs; tests go beyond those of training.
_ZOOLOGY = "64x4,128x8,256x16,256x32,256x64"
_WEB["recall"] = Corpus(
    "mqar",
    "zoology's recall task",
    {
        "corpus": f"task:mqar?vocab=8192&settings={_ZOOLOGY}&test={_ZOOLOGY},512x128,1024x256",
        "block_size": 256,
        "tokenizer": "bytes",
    },
)
# Corpora that are drawn, at every scale alike.
_TASKS = {
    label: Corpus(label, title, {"corpus": f"task:{task}"})
    for label, title, task in (
        ("overwrite", "8 keys, each written twice", "mqar?pairs=8&writes=2"),
        ("induction", "Induction", "induction"),
        ("selective_copy", "Selective copying", "selective_copy"),
        ("parity", "Parity", "parity"),
        ("s5", "Products in S5", "s5"),
        ("digits", "Digits as 64 pixels", "digits"),
        ("listops", "Nested lists of 64 tokens", "listops"),
    )
}
_TASK: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2},
    **{"initializer_range": 0.05, "layer": {"short_convolution": 3}},
    **{"block_size": 64, "batch_size": 32, "steps": 1_000, "learning_rate": 3e-3},
    **{"schedule_steps": None, "warmup_steps": None, "gradient_clip": 1.0},
    **{"evaluate_every": 100, "save_every": 1_000, "stop_at_accuracy": 0.99},
}
_BOTH: dict[str, Any] = {
    **{name: value for name, value in _TASK.items() if name not in ("layer", "stop_at_accuracy")},
    **{"causal": False, "block_size": 66},
}
# Two layers of [short convolution, attention] without an MLP, as zoology's; rotary positions are
# not needed, since a pair is a key and the next token.
_RECALL: dict[str, Any] = {
    "num_layers": 2,
    "intermediate_size": 0,
    "num_heads": 1,
    "layer": {"short_convolution": 3, "rotary": False},
    "stop_at_accuracy": 0.99,
    "skip_non_finite": 100,  # of the highest learning rates
}
_NARROW = (2, 4, 8, 16)  # at which every order fails somewhere, with 16 pairs
_DEMO_RECALL: dict[str, Any] = {
    **_RECALL,
    "hidden_size": 64,
    "batch_size": 32,
    "steps": 600,
    "evaluate_every": 100,
    "save_every": 600,
}
_SMALL_RECALL: dict[str, Any] = {
    **_RECALL,
    "hidden_size": 128,
    "initializer_range": 0.02,
    "batch_size": 256,
    "steps": 20_000,
    "warmup_steps": 2_000,
    "schedule_steps": None,
    "evaluate_every": 500,
    "save_every": 500,
    "gradient_clip": 1.0,
}

# Of runs that may diverge. A row is the mean of five steps: of more, a spike would be too flat.
_UNSTEADY: dict[str, Any] = {"skip_non_finite": 100, "log_every": 5}
_CONDITIONS: dict[str, Mapping[str, Any]] = {
    **{"base": {}, "long": {"block_size": 4096}, "family": {}, "stability": _UNSTEADY},
    **{"recall": _SMALL_RECALL, "task": _TASK, "both": _BOTH},
}
_DEMO = {
    **PRESETS["demo"],
    # After only 1,000 steps seeds differ by more than variants do.
    "steps": 1_500,
    "evaluate_every": 300,
    "save_every": 300,
    "test_fraction": 0.01,
}
_DEMO_CONDITIONS = {
    "base": {},
    "large": {"hidden_size": 192, "intermediate_size": 384, "num_heads": 6},
    "long": {"block_size": 1024, "batch_size": 1},
    "family": {"num_layers": 2},
    "stability": {**_UNSTEADY, "num_layers": 2, "steps": 600},
    "recall": _DEMO_RECALL,
    "task": _TASK,
    "both": _BOTH,
}

SCALES: dict[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            "demo",
            "a byte model of 0.7 M parameters on a laptop: minutes a run",
            _DEMO,
            {
                **_DEMO_CONDITIONS,
                # 16 variants with three seeds in about an hour on two cores.
                "family": {"num_layers": 2, "steps": 1_000, "evaluate_every": 250},
            },
            _INSTALLED | _TASKS,
            _NARROW,
        ),
        Scale(
            "evening",
            "the demo's model on five times as many tokens",
            {**_DEMO, "steps": 7_500, "evaluate_every": 500, "save_every": 500},
            _DEMO_CONDITIONS,
            _INSTALLED | _TASKS,
            _NARROW,
        ),
        Scale(
            "small",
            "the paper's small model for 5,000 steps: hours a run on one GPU",
            {
                **PRESETS["small"],
                "steps": 5_000,
                "schedule_steps": None,
                "warmup_steps": 500,
                "evaluate_every": 500,
                "save_every": 500,
            },
            {**_CONDITIONS, "large": {"num_layers": 40}},
            _WEB | _TASKS,
        ),
        Scale(
            "paper",
            "appendix D, with the schedule that the authors' code runs (decay over 1,000,000)",
            PRESETS["small"],
            {**_CONDITIONS, "large": PRESETS["large"]},
            _WEB | _TASKS,
        ),
        Scale(
            "paper-list",
            "appendix D exactly: the learning rate decays to zero at step 100,000",
            {**PRESETS["small"], "schedule_steps": None},
            {**_CONDITIONS, "large": {**PRESETS["large"], "schedule_steps": None}},
            _WEB | _TASKS,
        ),
    )
}
