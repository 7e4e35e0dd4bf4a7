"""A figure of variants whose states differ in size: loss curves, and loss against that size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from softmax_rnn.report.curves import curves, note, seed_interval
from softmax_rnn.report.figure import TITLES, explain, log_limits, loss_axis, panel, save
from softmax_rnn.report.memory import layer_memory
from softmax_rnn.report.style import LOOK, styles
from softmax_rnn.report.table import by_variant
from softmax_rnn.training.folder import RunFolder

_HEIGHT, _NAME = 270, 8  # of the axes and of a name, in points
_MARKERS = {"state": "o", "cache": "o", "window": "s", "state and window": "s"}
_KINDS = {
    "state": "state of a finite series",
    "cache": "keys and values of all tokens",
    "window": "keys and values of a window",
    "state and window": "state, and keys and values of a window",
}


def draw_states(runs: Sequence[RunFolder], title: str, stem: Path) -> list[Path]:
    """Test and train loss against tokens, test loss against the state; writes PNG and SVG."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(15.0, 5.2), layout="constrained")
        axes = figure.subplots(1, 3)
        drawn = {split: curves(runs, split) for split in TITLES}
        limits = log_limits([line for lines in drawn.values() for line in lines])
        for ax, (split, lines) in zip(axes, drawn.items(), strict=False):
            panel(ax, lines, TITLES[split])
            ax.set_ylim(*limits)
        axes[0].set_ylabel("nats per token (log scale)")
        _losses(axes[2], runs)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", title="final test loss")
        figure.suptitle(title)
        words = note(len(line.seeds) for line in drawn["test"])
        tokens = runs[0].config.block_size
        explain(
            figure,
            f"{words} Right: what one layer keeps after {tokens:,} tokens, in float32; if the "
            "marker is hollow, it grows with the sequence.",
        )
        return save(figure, stem)


def _losses(ax: Axes, runs: Sequence[RunFolder]) -> None:
    """Draw the final test loss of each variant against the bytes that a layer keeps."""
    grouped = by_variant(runs)
    looks = styles(grouped)
    memories = {
        name: layer_memory(next(iter(grouped[name].values())).new_model) for name in grouped
    }
    means: dict[str, tuple[float, float]] = {}
    for variant, seeds in grouped.items():
        memory, color = memories[variant], looks[variant].color
        losses = np.array([run.summary["test_loss"] for run in seeds.values()])
        mean, low, high = seed_interval(losses)
        means[variant] = memory.size / 1024, float(mean)
        ax.errorbar(
            *means[variant],
            yerr=[[mean - low], [high - mean]],
            color=color,
            marker=_MARKERS[memory.kind],
            markerfacecolor="white" if memory.grows else color,
            markersize=6,
            linestyle="none",
            elinewidth=0.8,
            capsize=2,
        )
    for variant, shift in _shifts(means).items():
        ax.annotate(
            variant,
            means[variant],
            xytext=(7, shift - 3),
            textcoords="offset points",
            fontsize="x-small",
            color=looks[variant].color,
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    loss_axis(ax)
    ax.margins(x=0.25)  # for the names
    ax.set_title("Test loss against the size of the state")
    ax.set_xlabel("KiB per layer and sequence (log scale)")
    kinds = {memory.kind for memory in memories.values()}
    ax.legend(handles=[_key(kind) for kind in _KINDS if kind in kinds], fontsize="x-small")


def _shifts(means: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """How far to move each variant's name upwards, in points, so that no two overlap."""
    heights = {name: math.log(loss) for name, (_, loss) in means.items()}
    low, high = min(heights.values()), max(heights.values())
    shifts: dict[str, float] = {}
    tops: dict[int, float] = {}  # of the names so far, by their column
    for name in sorted(heights, key=lambda name: heights[name]):
        height = _HEIGHT * (heights[name] - low) / (high - low or 1.0)
        column = round(math.log2(means[name][0]))
        tops[column] = max(height, tops.get(column, -math.inf) + _NAME)
        shifts[name] = tops[column] - height
    return shifts


def _key(kind: str) -> Line2D:
    face = "white" if kind == "cache" else "0.35"
    return Line2D(
        [], [], color="0.35", marker=_MARKERS[kind], markerfacecolor=face, linestyle="none",
        label=_KINDS[kind],
    )  # fmt: skip
