"""What an experiment is: panels of variants, and the settings of a scale. Nothing runs here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from softmax_rnn._utils.errors import unknown
from softmax_rnn.experiments.run import PlannedRun, require_different
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder

T = TypeVar("T")


@dataclass(frozen=True)
class Panel:
    """Variants trained side by side under one condition.

    Attributes:
        title: what the paper calls it.
        variants: names, as ``compare`` takes them.
        corpus: a name of the scale's corpora: ``pile``, ``slimpajama`` or ``fineweb``.
        condition: a name of the scale's conditions: ``base``, ``large`` (model) or ``long``
            (sequence).
    """

    title: str
    variants: tuple[str, ...]
    corpus: str = "fineweb"
    condition: str = "base"


@dataclass(frozen=True)
class Experiment:
    """A figure of the paper.

    Attributes:
        name: ``figure4``.
        title: what it shows.
        panels: one a column of curves, or a line of final losses.
        kind: ``curves`` (loss against tokens, test above train) or ``orders`` (final training loss
            against the highest power).
        large: whether it is drawn larger, as in the appendix.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    kind: Literal["curves", "orders"] = "curves"
    large: bool = False

    def only(self, variants: Sequence[str]) -> Experiment:
        """The same figure of some of its variants; panels without any are left out."""
        known = {variant for panel in self.panels for variant in panel.variants}
        for variant in variants:
            if variant not in known:
                raise unknown(f"variant of {self.name}", variant, known)
        kept = [
            replace(panel, variants=tuple(name for name in panel.variants if name in variants))
            for panel in self.panels
        ]
        return replace(self, panels=tuple(panel for panel in kept if panel.variants))


@dataclass(frozen=True)
class Corpus:
    """A corpus under the name that folders and titles carry, and its settings."""

    label: str
    title: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """How large: the settings of every run, those of each condition, and the corpora.

    Attributes:
        name: ``demo``, ``small``, ``paper`` or ``paper-list``.
        about: one line for people.
        base: settings of every run.
        conditions: settings besides, by condition.
        corpora: by the paper's names; several may be one here.
        seeds: one run each, unless others are asked for.
    """

    name: str
    about: str
    base: Mapping[str, Any]
    conditions: Mapping[str, Mapping[str, Any]]
    corpora: Mapping[str, Corpus]
    seeds: tuple[int, ...] = (0,)

    def config(self, panel: Panel, variant: str, seed: int, fields: Mapping[str, Any]) -> RunConfig:
        """The run of a panel's variant; ``fields`` win over the scale's.

        Raises:
            ValueError: for a field that is unknown, or that the figure sets itself.
        """
        for name, instead in (("attention", "--variants"), ("seed", "--seeds")):
            if name in fields:
                raise ValueError(f"{name} is what the figure sets: use {instead}.")
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

    def folder(self, root: Path, panel: Panel, variant: str, seed: int) -> RunFolder:
        """Where that run lives: one place, whichever figures share it."""
        where = f"{panel.condition}-{self.corpora[panel.corpus].label}"
        return RunFolder(root / self.name / where / f"{variant.replace(':', '-')}-seed{seed}")


def planned(
    experiment: Experiment,
    scale: Scale,
    root: Path,
    seeds: tuple[int, ...],
    fields: Mapping[str, Any] | None = None,
) -> list[PlannedRun]:
    """Every run of an experiment, each once, seed after seed.

    Raises:
        ValueError: for a seed given twice, or invalid fields.
    """
    require_different(seeds)
    runs = {}
    for seed in seeds:
        for panel in experiment.panels:
            for variant in panel.variants:
                folder = scale.folder(root, panel, variant, seed)
                config = scale.config(panel, variant, seed, fields or {})
                runs[folder.path] = PlannedRun(config, folder)
    return list(runs.values())


def by_name(what: str, name: str, table: Mapping[str, T]) -> T:
    """An entry of a table, or an error that names the nearest."""
    if name not in table:
        raise unknown(what, name, table)
    return table[name]
