"""Recall against the size of the state: accuracy on a task, one panel per series."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType

from softmax_rnn.report.curves import seed_interval
from softmax_rnn.report.figure import explain, save
from softmax_rnn.report.memory import layer_memory
from softmax_rnn.report.style import LOOK, style
from softmax_rnn.report.table import label
from softmax_rnn.training.folder import RunFolder

_ORDER = re.compile(r"([a-z_]+):(\d+)((?:\+decay)?)")
_WINDOW = "window"


class _Kind(NamedTuple):
    """How the points of a panel's families are drawn."""

    marker: str
    dashes: LineStyleType
    words: str


_KINDS = {"": _Kind("o", "-", "without decay"), "+decay": _Kind("^", "--", "with a token decay")}
_OTHERS = ((_Kind("s", ":", "window"), _WINDOW), (_Kind("D", "none", "softmax"), "softmax"))


def recall_table(runs: Sequence[RunFolder]) -> pd.DataFrame:
    """One row per variant and width of queries and keys.

    Columns: variant; series (``taylor``, or the whole name without an order); order (an order, or a
    window's size; missing without one); decay (``+decay`` or empty); width; bytes (that a layer
    keeps of one sequence, in float32); grows (whether it grows with the sequence); seeds;
    learning_rate; accuracy, low and high (mean over seeds, with its 95% interval; without one if
    there are fewer than three seeds); steps (mean over seeds, at the end of training).
    """
    found: dict[tuple[str, int], list[RunFolder]] = {}
    for run in runs:
        config = run.new_model
        width = config.variant.options.qk_dim or config.hidden_size // config.num_heads
        found.setdefault((label(run), width), []).append(run)
    rows = []
    for (variant, width), seeds in found.items():
        parts = _ORDER.fullmatch(variant)
        memory = layer_memory(seeds[0].new_model)
        accuracies = np.array([run.summary["test_accuracy"] for run in seeds])
        accuracy, low, high = seed_interval(accuracies)
        rows.append(
            {
                "variant": variant,
                "series": parts[1] if parts else variant,
                "order": int(parts[2]) if parts else pd.NA,
                "decay": parts[3] if parts else "",
                "width": width,
                "bytes": memory.size,
                "grows": memory.grows,
                "seeds": len(seeds),
                "learning_rate": seeds[0].config.learning_rate,
                "accuracy": float(accuracy),
                "low": float(low),
                "high": float(high),
                "steps": float(np.mean([run.summary["steps"] for run in seeds])),
            }
        )
    return pd.DataFrame(rows).astype({"order": "Int64"})


def draw_recall(runs: Sequence[RunFolder], title: str, stem: Path) -> list[Path]:
    """Accuracy against the bytes that a layer keeps; writes PNG and SVG.

    One panel per series: points of one width are joined in the order of their powers. Softmax and
    windows are in every panel.
    """
    table = recall_table(runs)
    series = list(dict.fromkeys(table.series[table.order.notna() & (table.series != _WINDOW)]))
    with mpl.rc_context(LOOK):
        columns = max(1, len(series))
        figure = Figure(figsize=(1.0 + 3.6 * columns, 4.4), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False, sharex=True, sharey=True)[0]
        for ax, name in zip(axes, series or [""], strict=True):
            _panel(ax, table, name)
        axes[0].set_ylabel("accuracy on the asked positions")
        kinds = [*_KINDS.values(), *(kind for kind, name in _OTHERS if name in set(table.series))]
        figure.legend(handles=[_key(kind) for kind in kinds], loc="outside right upper")
        figure.suptitle(title)
        seeds = "Means over seeds, bars are 95% intervals." if table.seeds.min() > 2 else "Means."
        explain(
            figure,
            f"{seeds} Numbers are orders; a line joins the orders of one width of queries and keys "
            "(lighter: wider). Hollow: grows with the sequence.",
        )
        return save(figure, stem)


def _panel(ax: Axes, table: pd.DataFrame, series: str) -> None:
    """Draw a series with and without a decay, windows, and softmax."""
    widths = sorted(table.width.unique())
    shades = dict(zip(widths, np.linspace(1.0, 0.4, len(widths)), strict=True))
    own = table[(table.series == series) & table.order.notna()]
    for (decay, width), points in own.groupby(["decay", "width"], sort=True):
        look, kind = style(series), _KINDS[str(decay)]
        _points(ax, points, look.color, kind, shades[width])
        for point in points.to_dict("records"):
            place, shift = (point["bytes"] / 1024, point["accuracy"]), (3, 4 if decay else -9)
            ax.annotate(
                str(point["order"]), place, xytext=shift, textcoords="offset points",
                fontsize="xx-small", color=look.color,
            )  # fmt: skip
    for kind, name in _OTHERS:
        for width, points in table[table.series == name].groupby("width"):
            _points(ax, points, "0.35", kind, shades[width])
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_ylim(-0.03, 1.05)
    ax.set_title(series)
    ax.set_xlabel("KiB per layer and sequence (log scale)")


def _points(ax: Axes, points: pd.DataFrame, color: str, kind: _Kind, shade: float) -> None:
    points = points.sort_values("bytes")
    ax.errorbar(
        points.bytes / 1024,
        points.accuracy,
        yerr=[points.accuracy - points.low, points.high - points.accuracy],
        color=color,
        marker=kind.marker,
        markersize=4,
        markerfacecolor="white" if points.grows.any() else color,
        linestyle=kind.dashes,
        linewidth=1.0,
        elinewidth=0.7,
        capsize=2,
        alpha=shade,
    )


def _key(kind: _Kind) -> Line2D:
    face = "white" if kind.words == "softmax" else "0.35"
    return Line2D(
        [], [], color="0.35", marker=kind.marker, markersize=4, markerfacecolor=face,
        linestyle=kind.dashes, linewidth=1.0, label=kind.words,
    )  # fmt: skip
