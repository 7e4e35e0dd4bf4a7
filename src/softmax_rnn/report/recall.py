"""Recall against the size of the state: accuracy on a task by bytes, and by order and width."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from softmax_rnn.report.curves import seed_interval
from softmax_rnn.report.figure import explain, label_ends, save
from softmax_rnn.report.memory import layer_memory
from softmax_rnn.report.style import LOOK, Style, style, styles
from softmax_rnn.report.table import label
from softmax_rnn.training.folder import RunFolder

_ORDER = re.compile(r"([a-z_]+):(\d+)((?:\+decay)?)")
_WINDOW = "window"
_PLAIN = 0.98  # accuracy from which a marker needs no words


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
    """Accuracy against the bytes that a layer keeps, and against the order; writes PNG and SVG.

    Left: of each series the best width and order with so many bytes, beside softmax and windows.
    Right: the first series by order, a line for each width of queries and keys.
    """
    table = recall_table(runs)
    own = table[table.order.notna() & (table.series != _WINDOW)]
    families = list(dict.fromkeys(own.series + own.decay))
    looks = styles(families)
    first = own[own.series + own.decay == families[0]] if families else own
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.7, 1], sharey=True)
        for name in families:
            _frontier(left, own[own.series + own.decay == name], name, looks[name])
        _others(left, table)
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter("{x:g}")
        left.set_ylim(-0.03, 1.05)
        left.set_title("The best of each series with so many bytes")
        left.set_xlabel("KiB per layer and sequence (log scale)")
        left.set_ylabel("accuracy on the asked positions")
        left.legend(loc="lower right", fontsize="small", handlelength=3)
        if families:
            _orders(right, first, families[0])
        figure.suptitle(title)
        seeds = "Means over seeds, bars are 95% intervals." if table.seeds.min() > 2 else "Means."
        explain(
            figure,
            f"{seeds} Left: dots are widths and orders, a line the best of them with so many bytes;"
            "\nhollow markers grow with the sequence, squares are windows.",
        )
        return save(figure, stem)


def _frontier(ax: Axes, points: pd.DataFrame, name: str, look: Style) -> None:
    """Draw the points of a series, and the best accuracy with at most so many bytes."""
    points = points.sort_values("bytes")
    ax.plot(points.bytes / 1024, points.accuracy, ".", color=look.color, markersize=3, alpha=0.5)
    ax.plot(
        points.bytes / 1024, points.accuracy.cummax(), color=look.color, linestyle=look.dashes,
        linewidth=1.4, drawstyle="steps-post", label=name,
    )  # fmt: skip


def _others(ax: Axes, table: pd.DataFrame) -> None:
    """Draw softmax at each width, and windows."""
    for marker, name in (("s", _WINDOW), ("D", "softmax")):
        points = table[table.series == name]
        if points.empty:
            continue
        face = "white" if points.grows.any() else "0.25"
        ax.plot(
            points.bytes / 1024, points.accuracy, marker, color="0.25", markersize=4.5,
            markerfacecolor=face, label=name,
        )  # fmt: skip
        for point in points[points.accuracy < _PLAIN].to_dict("records"):
            ax.annotate(
                f"{point['order']} tokens" if name == _WINDOW else f"width {point['width']}",
                (point["bytes"] / 1024, point["accuracy"]),
                xytext=(6, -3),
                textcoords="offset points",
                fontsize="x-small",
                color="0.25",
            )


def _orders(ax: Axes, table: pd.DataFrame, series: str) -> None:
    """Draw the accuracy of a series against its order, for each width."""
    widths = sorted(table.width.unique())
    color, looks = style(series).color, {}
    for width, dashes in zip(widths, itertools.cycle(("-", "--", "-.", ":"))):
        points = table[table.width == width].sort_values("order")
        spread = [points.accuracy - points.low, points.high - points.accuracy]
        ax.errorbar(
            points.order.astype(int), points.accuracy, yerr=spread, color=color, linestyle=dashes,
            marker="o", markersize=3, linewidth=1.2, elinewidth=0.7, capsize=2,
        )  # fmt: skip
        looks[f"{width} wide"] = Style(color, dashes)
    ends = {
        f"{width} wide": (int(points.order.max()), points.sort_values("order").accuracy.iloc[-1])
        for width, points in table.groupby("width")
    }
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(f"{series} by order and width")
    ax.set_xlabel("highest power n")
    label_ends(ax, ends, looks)
