"""A figure of final losses minus softmax's, a row for each variant, in the order of its panel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from softmax_rnn.report.figure import explain, save
from softmax_rnn.report.grid import Column
from softmax_rnn.report.style import LOOK
from softmax_rnn.report.table import REFERENCE, by_variant, label, results

_COLOR = "#0072B2"
_ROW, _REST = 0.3, 1.6  # inches: of a variant, of everything else


def draw_steps(columns: Sequence[Column], title: str, stem: Path) -> list[Path]:
    """Final test losses minus softmax's with their intervals; writes PNG and SVG."""
    columns = [
        x for x in columns if len(by_variant(x.runs)) > 1 and REFERENCE in by_variant(x.runs)
    ]
    if not columns:
        return []
    rows = max(len(by_variant(column.runs)) for column in columns) - 1
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(5.5 * len(columns), _REST + _ROW * rows), layout="constrained")
        for ax, column in zip(
            figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True
        ):
            _rows(ax, column)
        figure.suptitle(title)
        seeds = max(len(seeds) for x in columns for seeds in by_variant(x.runs).values())
        interval = "over seeds and test blocks" if seeds > 1 else "over test blocks only: one seed"
        words = f"Means with 95% intervals {interval}."
        explain(figure, f"{words} Small dots: each seed, paired with softmax of the same seed.")
        return save(figure, stem)


def _rows(ax: Axes, column: Column) -> None:
    """Draw the variants of a panel."""
    grouped = by_variant(column.runs)
    table = {row["variant"]: row for row in results(column.runs).to_dict("records")}
    names = [name for name in dict.fromkeys(map(label, column.runs)) if name != REFERENCE]
    for place, name in enumerate(names):
        row = table[name]
        both = sorted(grouped[name].keys() & grouped[REFERENCE].keys())
        each = [
            grouped[name][seed].summary["test_loss"] - grouped[REFERENCE][seed].summary["test_loss"]
            for seed in both
        ]
        ax.plot(each, np.full(len(each), place + 0.22), ".", color="0.6", markersize=3)
        mean = row["difference"]
        spread = [[mean - row["low"]], [row["high"] - mean]]
        finite = np.isfinite(spread).all()
        ax.errorbar(
            mean, place, xerr=spread if finite else None, fmt="o", color=_COLOR, capsize=2,
            elinewidth=1.0, markersize=5,
        )  # fmt: skip
        ax.annotate(
            f"{mean:+.3f}", (1.0, place), xycoords=("axes fraction", "data"), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize="small", color="0.3",
        )  # fmt: skip
    ax.axvline(0, color="0.2", linewidth=0.8)
    ax.annotate(
        REFERENCE, (0, 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
        textcoords="offset points", ha="center", fontsize="small",
    )  # fmt: skip
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"test loss minus {REFERENCE}'s, nats per token")
    ax.set_title(column.title, pad=18)
