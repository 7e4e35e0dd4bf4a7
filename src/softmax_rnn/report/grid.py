"""The paper's figures in the paper's layout: one column per panel, test above train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from softmax_rnn.report.curves import curves, note, seed_interval, single_seeds
from softmax_rnn.report.figure import TITLES, explain, log_limits, panel, save
from softmax_rnn.report.style import LOOK, style
from softmax_rnn.training.folder import RunFolder


class Column(NamedTuple):
    """A panel of a figure and its finished runs."""

    title: str
    runs: Sequence[RunFolder]


def draw_curves(columns: Sequence[Column], title: str, stem: Path, large: bool) -> list[Path]:
    """Loss against tokens, one column per panel, test above train; writes PNG and SVG."""
    unit = (7.4, 4.2) if large else (5.6, 3.0)
    counts: list[int] = []
    with mpl.rc_context(LOOK):
        size = (unit[0] * len(columns), unit[1] * len(TITLES) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(TITLES), len(columns), squeeze=False, sharex="col")
        for index, column in enumerate(columns):
            drawn = {split: curves(column.runs, split) for split in TITLES}
            counts += [len(line.seeds) for line in drawn["test"]]
            limits = log_limits([line for lines in drawn.values() for line in lines])
            for row, (split, lines) in enumerate(drawn.items()):
                ax = axes[row, index]
                panel(ax, lines, f"{column.title}: {TITLES[split].lower()}")
                ax.set_ylim(*limits)
                # Beside the axes: inside it would hide curves.
                ax.legend(
                    title="final loss",
                    loc="upper left",
                    bbox_to_anchor=(1, 1),
                    frameon=False,
                    handlelength=3,
                )
            axes[0, index].set_xlabel("")
        for row in axes[:, 0]:
            row.set_ylabel("nats per token (log scale)")
        figure.suptitle(title)
        explain(figure, note(counts))
        return save(figure, stem)


def draw_orders(columns: Sequence[Column], title: str, stem: Path) -> list[Path]:
    """Final losses against the highest power, softmax as a horizontal line; writes PNG and SVG."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.0, 3.8), layout="constrained")
        axes = figure.subplots(1, 2)
        for ax, (quantity, name) in zip(
            axes, (("train_loss", "Train loss"), ("test_loss", "Test loss")), strict=True
        ):
            losses = [_orders(ax, column, quantity) for column in columns]
            every = [loss for series in losses for seeds in series for loss in seeds]
            ax.set_title(name)
            ax.set_xlabel("highest power n")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_yscale("log")
            ax.set_ylim(0.97 * min(every), 1.03 * max(every))  # intervals may be cut
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")
        axes[0].set_ylabel("nats per token (log scale)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")
        figure.suptitle(title)
        counts = (len(seeds) for series in losses for seeds in series)
        explain(figure, note(counts, single="Dots", band="Bars"))
        return save(figure, stem)


def _orders(ax: Axes, column: Column, quantity: str) -> list[list[float]]:
    """Draw a series' losses against its orders, with seeds or intervals; return all losses."""
    by_order: dict[str, list[float]] = {}
    for run in column.runs:
        order = str(run.config.attention).partition(":")[2]
        by_order.setdefault(order, []).append(run.summary[quantity])
    look = style(column.title)
    if set(by_order) == {""}:  # a variant without an order
        ax.axhline(float(np.mean(by_order[""])), color=look.color, label=column.title)
        return [by_order[""]]
    orders = sorted(by_order, key=int)
    stats = [seed_interval(np.array(by_order[order])) for order in orders]
    means = [mean for mean, _, _ in stats]
    spread = [[mean - low for mean, low, _ in stats], [high - mean for mean, _, high in stats]]
    ax.errorbar(
        [int(order) for order in orders],
        means,
        yerr=spread,
        color=look.color,
        linestyle=look.dashes,
        marker="o",
        markersize=3,
        capsize=2,
        label=column.title,
    )
    for order in orders:
        single = single_seeds(np.array(by_order[order]))
        ax.scatter([int(order)] * len(single), single, 4, color=look.color, alpha=0.6)
    return list(by_order.values())
