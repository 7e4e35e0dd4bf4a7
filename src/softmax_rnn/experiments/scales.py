"""The scales at which a figure can be reproduced: a laptop, one GPU, the paper's cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from softmax_rnn.experiments.figures import Panel
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
        name: name of the scale, and of the folder of its runs.
        about: one line for the command's help.
        base: settings of every run.
        conditions: further settings by condition.
        corpora: corpora by the name in a panel.
    """

    name: str
    about: str
    base: Mapping[str, Any]
    conditions: Mapping[str, Mapping[str, Any]]
    corpora: Mapping[str, Corpus]

    def config(self, panel: Panel, variant: str, seed: int, fields: Mapping[str, Any]) -> RunConfig:
        """The configuration of a run; ``fields`` override the scale's settings.

        Raises:
            ValueError: for a field that is unknown, or that has an option of its own.
        """
        for name, instead in (("attention", "--variants"), ("seed", "--seeds")):
            if name in fields:
                raise ValueError(f"{name} cannot be set here: use {instead}.")
        return RunConfig.from_dict(
            {
                **self.base,
                **self.conditions[panel.condition],
                **self.corpora[panel.corpus].fields,
                **fields,
                "attention": variant,
                "seed": seed,
            }
        )

    def place(self, panel: Panel) -> tuple[str, str]:
        """The condition and the label of the corpus of a panel's runs; figures share them."""
        return panel.condition, self.corpora[panel.corpus].label

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
}

_LONG = {"block_size": 4096}
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
            _INSTALLED,
        ),
        Scale(
            "evening",
            "the demo's model on five times as many tokens",
            {**_DEMO, "steps": 7_500, "evaluate_every": 500, "save_every": 500},
            _DEMO_CONDITIONS,
            _INSTALLED,
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
            {"base": {}, "large": {"num_layers": 40}, "long": _LONG, "family": {}},
            _WEB,
        ),
        Scale(
            "paper",
            "appendix D, with the schedule that the authors' code runs (decay over 1,000,000)",
            PRESETS["small"],
            {"base": {}, "large": PRESETS["large"], "long": _LONG, "family": {}},
            _WEB,
        ),
        Scale(
            "paper-list",
            "appendix D exactly: the learning rate decays to zero at step 100,000",
            {**PRESETS["small"], "schedule_steps": None},
            {
                **{"base": {}, "long": _LONG, "family": {}},
                "large": {**PRESETS["large"], "schedule_steps": None},
            },
            _WEB,
        ),
    )
}
