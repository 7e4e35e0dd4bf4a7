"""Choose a setting of each variant by trial runs, once, with one seed.

A trial is evaluated on validation documents (``evaluate_on``): it neither reads the test split nor
trains on what it is judged by. While the best value is the first or last of its grid, the grid is
widened.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from softmax_rnn._utils.errors import unknown
from softmax_rnn._utils.plain_yaml import parse_yaml
from softmax_rnn._utils.progress import notice
from softmax_rnn.data import is_task
from softmax_rnn.experiments.figures import FIGURES, Experiment, Panel
from softmax_rnn.experiments.plan import PlannedRun, run_folder
from softmax_rnn.experiments.scales import Scale
from softmax_rnn.experiments.scheduler import RunsFailedError
from softmax_rnn.report.sweeps import SweepRecord, Trial, add_to_sweep
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder

SEED = 0  # of all trials, so that seeds that are added later have the same values
_WIDENED = 4  # values that are added to a grid at most, at either end
# What no sweep may change: the attention, and what its loss is measured on.
_FIXED = (
    *(
        "attention",
        "layer",
        "seed",
        "evaluate_on",
        "corpus",
        "text_column",
        "encoding",
        "bad_files",
    ),
    *("tokenizer", "vocab_size", "end_of_text", "block_size", "packing", "max_tokens"),
    *("test_fraction", "split_seed"),
)
T = TypeVar("T")


@dataclass(frozen=True)
class Sweep:
    """The values of a setting that are tried, numbers in ascending order.

    Raises:
        ValueError: for an unknown setting, fewer than two values, or a value given twice.
    """

    setting: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        names = [each.name for each in fields(RunConfig) if each.name not in _FIXED]
        if self.setting not in names:
            raise unknown("setting of --sweep", self.setting, names)
        if len(self.values) < 2:
            raise ValueError(f"--sweep {self.setting} needs two values or more to choose from.")
        for value in self.values:
            if self.values.count(value) > 1:
                raise ValueError(f"--sweep {self.setting} has the value {value!r} twice.")
        if self.numeric:
            object.__setattr__(self, "values", tuple(sorted(self.values)))

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """From ``SETTING=VALUE,VALUE,...``, the values as YAML."""
        setting, equals, values = text.partition("=")
        if not equals:
            raise ValueError(f"--sweep takes SETTING=VALUE,VALUE,..., not {text!r}.")
        where = f"The value of --sweep {setting}"
        return cls(setting, tuple(parse_yaml(value, where) for value in values.split(",")))

    @property
    def numeric(self) -> bool:
        """Whether the values are positive numbers, between and beyond which there are others."""
        return all(type(value) in (int, float) and value > 0 for value in self.values)


def family(variant: str) -> str:
    """A variant's name without its order or size: ``taylor+decay`` for ``taylor:2+decay``."""
    return re.sub(r":\d+", "", variant)


@dataclass
class Search:
    """The trials of a figure.

    Each variant of each panel has trials of its own. In a figure with ``by_family``, those of a
    family are of its middle variant (order 2 of 1 to 4), in the middle one of its panels, of the
    whole figure: some of a figure's variants have the same trials as all.

    Attributes:
        experiment: the figure.
        scale: the settings of its runs.
        root: folder of the runs of all figures, which share trials, too.
        fields: settings of every run that override the scale's.
        sweep: what is tried.
    """

    experiment: Experiment
    scale: Scale
    root: Path
    fields: Mapping[str, Any]
    sweep: Sweep
    _grids: dict[Hashable, list[Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.sweep.setting in self.fields:
            raise ValueError(f"{self.sweep.setting} is given by both --sweep and --with.")
        self._tried = self._places()
        self._grids = {key: list(self.sweep.values) for key in self._tried}

    def _key(self, panel: Panel, variant: str) -> Hashable:
        """What variants that have one value share."""
        if self.experiment.by_family:
            return family(variant)
        return self.scale.folder_name(panel), variant

    def _places(self) -> dict[Hashable, tuple[Panel, str]]:
        """The panel and variant that are tried, by key."""
        wanted = {self._key(p, name) for p in self.experiment.panels for name in p.variants}
        found: dict[Hashable, list[tuple[Panel, str]]] = {}
        for panel in FIGURES[self.experiment.name].panels:
            names: dict[Hashable, list[str]] = {}
            for name in panel.variants:
                names.setdefault(self._key(panel, name), []).append(name)
            for key in names.keys() & wanted:
                found.setdefault(key, []).append((panel, _middle(names[key])))
        return {key: _middle(found[key]) for key in sorted(found, key=str)}

    def _run(self, key: Hashable, value: Any) -> PlannedRun:
        panel, name = self._tried[key]
        tried = {self.sweep.setting: value, "evaluate_on": "validation"}
        config = self.scale.config(panel, name, SEED, {**self.fields, **tried})
        parent = self.root / self.scale.folder / "trials" / self.scale.folder_name(panel)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        return PlannedRun(config, run_folder(parent, f"{name}-{self.sweep.setting}{shown}", SEED))

    def runs(self) -> list[PlannedRun]:
        """Every trial, finished or not."""
        return [self._run(key, value) for key, grid in self._grids.items() for value in grid]

    def execute(self, run_all: Callable[[Sequence[PlannedRun]], None]) -> None:
        """Run all trials, and further ones while the best value is at the end of its grid.

        A trial may diverge, if another one of its grid has finished.

        Raises:
            RunsFailedError: if every trial of a grid has diverged.
        """
        while True:
            run_all(self.runs())
            for key in self._grids:
                if self._best(key) is None:
                    name, setting = self._tried[key][1], self.sweep.setting
                    tried = ", ".join(str(value) for value in self._grids[key])
                    raise RunsFailedError(f"{name} diverges with every {setting} of {tried}.")
            widened = [self._widen(key) for key in self._grids]
            if not any(widened):
                return

    def _best(self, key: Hashable) -> Any:
        """The value of the best finished trial; ``None`` if there is none."""
        finished = [v for v in self._grids[key] if self._run(key, v).folder.finished]
        return min(finished, key=lambda value: _order(self._run(key, value).folder), default=None)

    def _widen(self, key: Hashable) -> bool:
        """Add a value beyond the best one, if that is the first or the last; whether it did."""
        grid, best = self._grids[key], self._best(key)
        if not self.sweep.numeric or best not in (grid[0], grid[-1]):
            return False
        beside = grid[1] if best == grid[0] else grid[-2]
        value = float(f"{best * best / beside:.3g}")
        value = round(value) if isinstance(best, int) else value
        given = self.sweep.values
        added = sum(v < given[0] if best == grid[0] else v > given[-1] for v in grid)
        try:
            self._run(key, value)
            possible = value not in grid and added < _WIDENED
        except ValueError:  # no run can have this value
            possible = False
        if not possible:
            name, setting = self._tried[key][1], self.sweep.setting
            notice(f"The best {setting} of {name}, {best:g}, is at the end of what was tried.")
            return False
        self._grids[key] = sorted([*grid, value])
        return True

    def chosen(self, panel: Panel, variant: str) -> dict[str, Any]:
        """The setting of a variant's runs.

        Raises:
            ValueError: if no trial of it is finished.
        """
        best = self._best(self._key(panel, variant))
        if best is None:
            raise ValueError(f"No trial of {self.sweep.setting} is finished for {variant}.")
        return {self.sweep.setting: best}

    def record(self, scale: Scale) -> None:
        """Write beside the runs of ``scale`` what was tried and chosen for them."""
        setting = self.sweep.setting
        for panel in self.experiment.panels:
            chosen = {name: self.chosen(panel, name)[setting] for name in panel.variants}
            keys = dict.fromkeys(self._key(panel, name) for name in panel.variants)
            trials = [
                _trial(self._tried[key][1], value, self._run(key, value).folder)
                for key in keys
                for value in self._grids[key]
            ]
            found: SweepRecord = {"setting": setting, "chosen": chosen, "trials": trials}
            add_to_sweep(self.root / scale.folder / scale.folder_name(panel), found)

    def summary(self) -> str:
        """The chosen values, in one line."""
        shown = [f"{self._tried[key][1]} {self._best(key)}" for key in self._grids]
        return f"{self.sweep.setting}: {', '.join(shown)}"


def _middle(items: Sequence[T]) -> T:
    return items[(len(items) - 1) // 2]


def _order(run: RunFolder) -> tuple[Any, ...]:
    """How good a finished trial is; the best is the smallest.

    On a task it is the accuracy, up to the one at which runs end; then fewer steps; then the loss.
    """
    summary = run.summary
    loss = summary["test_loss"]
    if not is_task(run.config.corpus):
        return (loss,)
    return (
        -min(summary["test_accuracy"], run.config.stop_at_accuracy or 1.0),
        summary["steps"],
        loss,
    )


def _trial(variant: str, value: Any, run: RunFolder) -> Trial:
    if not run.finished:
        return {"variant": variant, "value": value, "loss": None, "accuracy": None, "steps": None}
    summary, asked = run.summary, is_task(run.config.corpus)
    return {
        "variant": variant,
        "value": value,
        "loss": summary["test_loss"],
        "accuracy": summary["test_accuracy"] if asked else None,
        "steps": summary["steps"],
    }


def copy_finished(runs: Sequence[PlannedRun], here: Path, there: Path) -> None:
    """Copy finished runs with the same settings from one scale's folder into another's."""
    for run in runs:
        other = RunFolder(there / run.folder.path.relative_to(here))
        if run.folder.path.exists() or not other.finished:
            continue
        try:
            other.check_same_config(run.config)
        except ValueError:
            continue
        aside = run.folder.path.with_name(f".{run.name}.parts")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(other.path, aside, ignore=shutil.ignore_patterns("lock"))
        aside.rename(run.folder.path)
