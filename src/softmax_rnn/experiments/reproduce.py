"""A figure of the paper: make the runs that are missing, then draw it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from softmax_rnn._utils.files import write_text
from softmax_rnn.experiments.claims import judge, verdict_table
from softmax_rnn.experiments.compare import run_all
from softmax_rnn.experiments.costs import UTILISATION, bytes_text, cost, count_text, hours_text
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.plan import Experiment, Scale, by_name, planned
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.report.check import check_run
from softmax_rnn.report.grid import Column, draw_curves, draw_orders
from softmax_rnn.report.html import Place, page
from softmax_rnn.report.report import report
from softmax_rnn.report.table import by_variant, require_comparable
from softmax_rnn.training.folder import RunFolder


def reproduce(
    figure: str,
    scale: str,
    root: Path,
    *,
    seeds: Sequence[int] | None = None,
    variants: Sequence[str] | None = None,
    parallel: int | None = None,
    cluster: str = "local",
    cluster_options: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    stop_after: float | None = None,
    console: Console,
) -> list[Path]:
    """Run what is missing of a figure, draw it, and report on every panel and on the whole.

    Args:
        figure: ``figure2`` to ``figure9``.
        scale: ``demo``, ``small``, ``paper`` or ``paper-list``.
        root: folder of all runs of all figures, which share them.
        seeds: one run each; the scale's unless given.
        variants: only these of the figure's; all of them unless given.
        parallel: runs at a time; see ``run_all``.
        cluster: ``local`` or ``slurm``; see ``run_all``.
        cluster_options: of the cluster.
        fields: settings of every run that win over the scale's.
        stop_after: seconds after which to stop as by a signal.
        console: where progress is shown.

    Returns:
        The paths of the figure, of its panels' reports, and of the page of all panels and claims.
    """
    experiment, at = _figure(figure, variants), by_name("scale", scale, SCALES)
    chosen = tuple(at.seeds if seeds is None else seeds)
    runs = planned(experiment, at, root, chosen, fields)
    run_all(
        runs,
        root / at.name,
        parallel=parallel,
        cluster=cluster,
        cluster_options=cluster_options,
        stop_after=stop_after,
        console=console,
    )
    paths = draw(experiment, at, root, chosen)
    corpora = {corpus.label: corpus.title for corpus in at.corpora.values()}
    places, conditions = [], {}
    for folder, members in _places([run.folder for run in runs]).items():
        table, written = report(members, folder)
        paths += written
        condition, _, corpus = folder.name.partition("-")
        places.append(Place(f"{corpora[corpus]}, {condition} settings", members, table))
        conditions[condition, corpus] = by_variant(members)
    overview = root / at.name / experiment.name / "report.html"
    overview.parent.mkdir(exist_ok=True)
    title = f"{experiment.title} ({experiment.name}, {at.name} scale)"
    claims = verdict_table(judge(conditions))
    write_text(overview, page(places, overview.parent, title, claims))
    return [*paths, overview]


def draw(experiment: Experiment, scale: Scale, root: Path, seeds: Sequence[int]) -> list[Path]:
    """Draw a figure from its finished runs."""
    columns, seen = [], set()
    for panel in experiment.panels:
        folders = [
            scale.folder(root, panel, variant, seed) for seed in seeds for variant in panel.variants
        ]
        key = tuple(folder.path for folder in folders)
        if key in seen:  # corpora that are one at this scale
            continue
        seen.add(key)
        columns.append(Column(panel.title, [folder for folder in folders if folder.finished]))
    if len(columns) < len(experiment.panels):
        corpora = {corpus.title for corpus in scale.corpora.values()}
        columns = [Column(", ".join(sorted(corpora)), columns[0].runs)]
    title = f"{experiment.title} ({scale.name} scale)"
    stem = root / scale.name / experiment.name
    if experiment.kind == "orders":
        return draw_orders(columns, title, stem)
    return draw_curves(columns, title, stem, experiment.large)


def plan_table(
    figure: str,
    scale: str,
    root: Path,
    gpu: str,
    *,
    seeds: Sequence[int] | None = None,
    variants: Sequence[str] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Every run of a figure with what it costs, and whether it is finished; nothing is run."""
    experiment, at = _figure(figure, variants), by_name("scale", scale, SCALES)
    rows = []
    for run in planned(experiment, at, root, tuple(seeds or at.seeds), fields):
        estimate = cost(run.config, gpu)
        rows.append(
            {
                "run": str(run.folder.path.relative_to(root / at.name)),
                "finished": run.folder.finished,
                "parameters": estimate.parameters,
                "tokens_per_step": run.config.tokens_per_step,
                "block_size": run.config.block_size,
                "steps": run.config.steps,
                "tokens": estimate.tokens,
                "operations": estimate.operations,
                "gpu_hours": estimate.gpu_hours,
                "memory_bytes": estimate.memory_bytes,
                "disk_bytes": estimate.disk_bytes,
            }
        )
    return pd.DataFrame(rows)


def _figure(name: str, variants: Sequence[str] | None) -> Experiment:
    experiment = by_name("figure", name, FIGURES)
    return experiment if variants is None else experiment.only(variants)


def rich_plan(plan: pd.DataFrame, gpu: str) -> Table:
    """The plan for the terminal, with the total below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.title = f"{len(plan)} runs; times on one {gpu} at {UTILISATION:.0%} of its peak"
    columns = ("run", "parameters", "tokens/step", "steps", "tokens", "FLOPs", "GPU time")
    for column in (*columns, "memory", "disk", ""):
        table.add_column(column, justify="left" if column in ("run", "") else "right", no_wrap=True)
    for row in plan.to_dict("records"):
        table.add_row(
            row["run"],
            count_text(row["parameters"]),
            f"{row['tokens_per_step'] // row['block_size']} x {row['block_size']}",
            f"{row['steps']:,}",
            count_text(row["tokens"]),
            f"{row['operations']:.2e}",
            hours_text(row["gpu_hours"]),
            bytes_text(row["memory_bytes"]),
            bytes_text(row["disk_bytes"]),
            "finished" if row["finished"] else "",
        )
    missing = plan[~plan.finished]
    table.add_section()
    table.add_row(
        f"{len(missing)} to run",
        *[""] * 3,
        count_text(missing.tokens.sum()),
        f"{missing.operations.sum():.2e}",
        hours_text(missing.gpu_hours.sum()),
        "",
        bytes_text(missing.disk_bytes.sum()),
    )
    return table


def finished_runs(scale: str, root: Path) -> dict[tuple[str, str], dict[str, dict[int, RunFolder]]]:
    """The finished runs of a scale by (condition, corpus label), variant and seed.

    Raises:
        ValueError: for a run with a damaged file, or runs that differ in more than they may.
    """
    at = by_name("scale", scale, SCALES)
    found: dict[tuple[str, str], dict[str, dict[int, RunFolder]]] = defaultdict(dict)
    for summary in sorted((root / at.name).glob("*/*/summary.json")):
        folder = RunFolder(summary.parent)
        check_run(folder)
        condition, _, corpus = summary.parts[-3].partition("-")
        name = str(folder.config.attention)
        found[condition, corpus].setdefault(name, {})[folder.config.seed] = folder
    for variants in found.values():
        require_comparable([run for seeds in variants.values() for run in seeds.values()])
    return dict(found)


def _places(folders: Sequence[RunFolder]) -> dict[Path, list[RunFolder]]:
    places: dict[Path, list[RunFolder]] = defaultdict(list)
    for folder in folders:
        places[folder.path.parent].append(folder)
    return dict(places)
