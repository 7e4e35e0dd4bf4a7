"""report.html: claims, tables, interactive curves and settings on one page that opens offline."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs

from softmax_rnn._utils.plain_yaml import format_yaml
from softmax_rnn.data.tasks import is_task
from softmax_rnn.report.curves import Curve, curves, note, train_curve
from softmax_rnn.report.figure import log_limits
from softmax_rnn.report.style import Style, styles
from softmax_rnn.report.table import by_variant, cells, conclusion, interval_note, label
from softmax_rnn.training.folder import RunFolder

_MAX_POINTS = 400  # of a training curve: a screen shows no more
# Smoothing levels, in points per window. A level needs 8 windows; the one shown first has 40.
_SMOOTHING = (1, 2, 5, 10, 20, 50)
_MIN_WINDOWS, _FIRST_WINDOWS = 8, 40


class Section(NamedTuple):
    """A section of the page: runs under one condition on one corpus, and their table."""

    title: str
    runs: Sequence[RunFolder]
    table: pd.DataFrame


def page(
    sections: Sequence[Section],
    folder: Path,
    title: str = "Attention variants side by side",
    claims: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The HTML page. All text from configurations is escaped.

    Args:
        sections: the sections of the page.
        folder: the folder of the page; its links are relative.
        title: the heading.
        claims: one row per check, from ``experiments.verdicts.verdict_table``.
    """
    environment = Environment(
        loader=PackageLoader("softmax_rnn.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        title=title,
        claims=claims,
        sections=[_section(section, folder) for section in sections],
        plotly=get_plotlyjs(),
    )


def _section(section: Section, folder: Path) -> dict[str, Any]:
    header, *rows = cells(section.table)
    drawn = _curves(section.runs)
    return {
        "title": section.title,
        "header": header,
        "rows": rows,
        "conclusion": conclusion(section.table),
        "note": interval_note(section.table),
        "lines": note(section.table.seeds, levels=_has_levels(drawn)),
        "curves": drawn,
        "runs": [
            {
                "name": f"{label(run)}, seed {run.config.seed}",
                "folder": run.path.name,
                "link": quote(Path(os.path.relpath(run.config_file, folder)).as_posix()),
                "config": format_yaml(run.config.to_dict()),
                "environment": format_yaml(run.environment),
            }
            for run in section.runs
        ],
    }


def _has_levels(drawn: Mapping[str, Any]) -> bool:
    return any(len(curve["tokens"]) == 1 for curve in drawn["test"][0])


def _curves(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The data of the page's script: curves at every smoothing level, and axis limits."""
    test, train = curves(runs, "test"), curves(runs, "train")
    levels, looks = _train_levels(runs), styles(curve.variant for curve in test)
    enough = [i for i, (_, level) in enumerate(levels) if len(level[0].mean) >= _FIRST_WINDOWS]
    asked = curves(runs, "accuracy") if is_task(runs[0].config.corpus) else []
    return {
        "limits": log_limits([*test, *train]),
        "accuracy": [[_plain(curve, looks[curve.variant]) for curve in asked]],
        "test": [[_plain(curve, looks[curve.variant]) for curve in test]],
        "train": [[_plain(curve, looks[curve.variant]) for curve in level] for _, level in levels],
        "steps": [steps for steps, _ in levels],
        "first": max(enough, default=0),
    }


def _train_levels(runs: Sequence[RunFolder]) -> list[tuple[int, list[Curve]]]:
    """Training curves at every smoothing level, with the number of steps per point."""
    logged = {
        variant: [run.metrics for run in seeds.values()]
        for variant, seeds in by_variant(runs).items()
    }
    rows = min(len(metrics) for seeds in logged.values() for metrics in seeds)
    finest = math.ceil(rows / _MAX_POINTS)
    sizes = [finest * n for n in _SMOOTHING if n == 1 or rows // (finest * n) >= _MIN_WINDOWS]
    return [
        (
            size * runs[0].config.log_every,
            [train_curve(variant, seeds, size) for variant, seeds in logged.items()],
        )
        for size in sizes
    ]


def _plain(curve: Curve, look: Style) -> dict[str, Any]:
    band = {"low": _rounded(curve.low), "high": _rounded(curve.high)}
    return {
        "variant": curve.variant,
        "color": look.color,
        "dash": look.plotly_dash,
        "tokens": curve.tokens.astype(int).tolist(),
        "mean": _rounded(curve.mean),
        "seeds": [_rounded(seed) for seed in curve.single],
        **(band if curve.has_band else {}),
    }


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    # Digits, not decimals: a loss that is rounded to 0 has no place on a logarithmic axis.
    return [None if np.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]
