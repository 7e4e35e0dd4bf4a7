"""Reproduce a figure: its runs, its image, its HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from softmax_rnn._utils.files import write_text
from softmax_rnn.experiments.figures import Experiment, Panel
from softmax_rnn.experiments.plan import PlannedRun, require_different, run_folder
from softmax_rnn.experiments.scales import Scale
from softmax_rnn.experiments.verdicts import Runs, judge, verdict_table
from softmax_rnn.report.check import check_run
from softmax_rnn.report.gaps import draw_gaps
from softmax_rnn.report.grid import Column, draw_curves, draw_orders
from softmax_rnn.report.html import Section, page
from softmax_rnn.report.outputs import report
from softmax_rnn.report.recall import draw_recall
from softmax_rnn.report.stability import draw_stability
from softmax_rnn.report.states import draw_states
from softmax_rnn.report.steps import draw_steps
from softmax_rnn.report.sweep_figure import draw_sweep
from softmax_rnn.report.sweeps import SweepRecord, read_sweep
from softmax_rnn.report.table import by_variant, require_comparable
from softmax_rnn.training.folder import RunFolder

# How figures that are no curves are drawn, by kind: panel by panel, and all runs in one.
_BY_PANEL = {"orders": draw_orders, "stability": draw_stability, "steps": draw_steps}
_ONE_PANEL = {"states": draw_states, "gaps": draw_gaps, "recall": draw_recall}


def figure_runs(
    experiment: Experiment,
    scale: Scale,
    root: Path,
    seeds: Sequence[int],
    fields: Mapping[str, Any] | None = None,
    chosen: Callable[[Panel, str], Mapping[str, Any]] | None = None,
) -> list[PlannedRun]:
    """Every run of a figure, once, ordered by seed.

    Args:
        experiment: the figure.
        scale: the settings of its runs.
        root: folder of the runs of all figures, which share runs.
        seeds: one run per variant and seed.
        fields: settings of every run that override the scale's.
        chosen: settings of a panel's variant (see :mod:`softmax_rnn.experiments.sweep`).

    Raises:
        ValueError: for a seed given twice, or invalid fields.
    """
    require_different(seeds)
    runs = {}
    for seed in seeds:
        for panel in experiment.panels:
            for variant in panel.variants:
                folder = run_folder(root / scale.folder / scale.folder_name(panel), variant, seed)
                own = {} if chosen is None else chosen(panel, variant)
                config = scale.config(panel, variant, seed, {**(fields or {}), **own})
                runs[folder.path] = PlannedRun(config, folder)
    return list(runs.values())


def report_figure(
    experiment: Experiment, scale: Scale, root: Path, seeds: Sequence[int]
) -> list[Path]:
    """Draw a figure from its finished runs, and write a report per condition and one for all.

    Returns:
        The paths of the figure, of the reports, and of the page of all conditions and claims.
    """
    paths = draw(experiment, scale, root, seeds)
    found: dict[Path, list[RunFolder]] = defaultdict(list)
    for run in figure_runs(experiment, scale, root, seeds):
        if run.folder.finished:
            found[run.folder.path.parent].append(run.folder)
    titles = {scale.place(panel): scale.title(panel) for panel in experiment.panels}
    sections, conditions = [], {}
    for folder, runs in found.items():
        table, written = report(runs, folder)
        paths += written
        condition, _, corpus = folder.name.partition("-")
        title = f"{titles[condition, corpus]}, {condition} settings"
        sections.append(Section(title, runs, table))
        conditions[condition, corpus] = by_variant(runs)
    overview = root / scale.folder / experiment.name / "report.html"
    overview.parent.mkdir(exist_ok=True)
    title = f"{experiment.title} ({experiment.name}, {scale.words})"
    claims = verdict_table(judge(conditions, scale))
    write_text(overview, page(sections, overview.parent, title, claims))
    return [*paths, overview]


def ended(experiment: Experiment, scale: Scale, root: Path, seeds: Sequence[int]) -> list[Column]:
    """The finished runs of each panel; panels without any are left out.

    In the figure about stability a run has also ended if it has diverged.
    """
    columns, unsteady = [], experiment.kind == "stability"
    for panel in experiment.panels:
        parent = root / scale.folder / scale.folder_name(panel)
        runs = [run_folder(parent, name, seed) for seed in seeds for name in panel.variants]
        if over := [run for run in runs if run.finished or (unsteady and run.diverged)]:
            columns.append(Column(panel.title or scale.title(panel), over))
    return columns


def draw(experiment: Experiment, scale: Scale, root: Path, seeds: Sequence[int]) -> list[Path]:
    """Draw a figure from its runs that have ended."""
    columns = ended(experiment, scale, root, seeds)
    title = f"{experiment.title} ({scale.words})"
    stem = root / scale.folder / experiment.name
    swept = _draw_sweep(experiment, scale, root, title)
    if experiment.kind in _BY_PANEL:
        return [*_BY_PANEL[experiment.kind](columns, title, stem), *swept]
    runs = [run for column in columns for run in column.runs]
    if experiment.kind in _ONE_PANEL:
        return [*_ONE_PANEL[experiment.kind](runs, title, stem), *swept]
    return [*draw_curves(columns, title, stem, experiment.large), *swept]


def _draw_sweep(experiment: Experiment, scale: Scale, root: Path, title: str) -> list[Path]:
    """Draw the trials by which the settings of a figure's runs were chosen, if they were."""
    columns: dict[str, SweepRecord] = {}
    for panel in experiment.panels:
        record = read_sweep(root / scale.folder / scale.folder_name(panel))
        if record is None:
            continue
        kept = {name: value for name, value in record["chosen"].items() if name in panel.variants}
        tried = record["trials"]
        if not experiment.by_family:
            tried = [trial for trial in tried if trial["variant"] in kept]
        name = panel.title or scale.title(panel)
        columns[name] = {"setting": record["setting"], "chosen": kept, "trials": tried}
        if experiment.by_family:  # which have the same trials in every panel
            columns = dict.fromkeys(["all panels"], columns[name])
    stem = root / scale.folder / f"{experiment.name}-sweep"
    return draw_sweep(columns, title, stem) if columns else []


def finished_runs(scale: Scale, root: Path) -> dict[tuple[str, str], Runs]:
    """The finished runs of a scale by (condition, corpus label), variant and seed.

    Raises:
        ValueError: for a run with a damaged file, or runs that cannot be compared.
    """
    found: dict[tuple[str, str], list[RunFolder]] = defaultdict(list)
    for summary in sorted((root / scale.folder).glob("*/*/summary.json")):
        folder = RunFolder(summary.parent)
        check_run(folder)
        condition, _, corpus = summary.parts[-3].partition("-")
        found[condition, corpus].append(folder)
    for runs in found.values():
        require_comparable(runs)
    return {condition: by_variant(runs) for condition, runs in found.items()}
