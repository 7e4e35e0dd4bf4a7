"""Choose the learning rate of each family of variants by trial runs, once, with one seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from softmax_rnn.experiments.figures import FIGURES, Experiment, Panel
from softmax_rnn.experiments.plan import PlannedRun, run_folder
from softmax_rnn.experiments.scales import Scale

# Zoology's: logspace(-3, -1.5, 4).
RATES = (1e-3, 3.16e-3, 1e-2, 3.16e-2)
_SEED = 0  # of all trials, so that seeds that are added later have the same rates
T = TypeVar("T")


def family(variant: str) -> str:
    """A variant's name without its order or size: ``taylor+decay`` for ``taylor:2+decay``."""
    return re.sub(r":\d+", "", variant)


def trials(
    experiment: Experiment, scale: Scale, root: Path, fields: Mapping[str, Any]
) -> list[PlannedRun]:
    """A run per family and learning rate, for the families of ``experiment``.

    Of each family it is the middle variant (order 2 of 1 to 4), in the middle one of its panels, of
    the whole figure: some of a figure's variants have the same trials as all.
    """
    wanted = {family(name) for panel in experiment.panels for name in panel.variants}
    places: dict[str, list[tuple[Panel, str]]] = {}
    for panel in FIGURES[experiment.name].panels:
        for kind in dict.fromkeys(map(family, panel.variants)):
            if kind not in wanted:
                continue
            names = [name for name in panel.variants if family(name) == kind]
            places.setdefault(kind, []).append((panel, _middle(names)))
    parent = root / scale.name / experiment.name / "rates"
    runs = []
    for panel, name in map(_middle, places.values()):
        for rate in RATES:
            config = scale.config(panel, name, _SEED, {**fields, "learning_rate": rate})
            runs.append(PlannedRun(config, run_folder(parent, f"{name}-rate{rate:g}", _SEED)))
    return runs


def _middle(items: Sequence[T]) -> T:
    return items[(len(items) - 1) // 2]


def chosen_rates(runs: Sequence[PlannedRun]) -> dict[str, float]:
    """The best learning rate of each family, from its finished trials.

    The best trial has the highest accuracy, up to the one at which runs end; then the fewest steps;
    then the lowest loss.

    Raises:
        ValueError: if no trial of a family is finished.
    """
    best: dict[str, tuple[Any, float]] = {}
    for run in runs:
        if run.folder.finished:
            summary, name = run.folder.summary, family(str(run.config.attention))
            accuracy = min(summary["test_accuracy"], run.config.stop_at_accuracy or 1.0)
            order = -accuracy, summary["steps"], summary["test_loss"]
            found = order, run.config.learning_rate
            best[name] = min(best.get(name, found), found)
    missing = {family(str(run.config.attention)) for run in runs} - set(best)
    if missing:
        raise ValueError(
            f"No trial of a learning rate is finished for {', '.join(sorted(missing))}."
        )
    return {name: rate for name, (_, rate) in best.items()}
