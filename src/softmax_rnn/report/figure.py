"""The figure: test and train loss against tokens, on a logarithmic axis; a task's accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from softmax_rnn._utils.files import file_aside
from softmax_rnn.data.tasks import is_task
from softmax_rnn.report.curves import Curve, curves, note
from softmax_rnn.report.style import LOOK, Style, styles
from softmax_rnn.training.folder import RunFolder

_START = 0.1  # share of the run, its steep start, that the vertical axis may cut off
_APART = 0.05  # of the height of an axis: between the labels of lines
TITLES = {"test": "Test loss", "train": "Train loss"}


def draw(runs: Sequence[RunFolder], folder: Path) -> list[Path]:
    """Write ``figure.png`` and ``figure.svg``; return their paths."""
    asked = is_task(runs[0].config.corpus)
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.0 + 4.0 * asked, 3.8), layout="constrained")
        axes = figure.subplots(1, 2 + asked, sharex=True)
        axes[1].sharey(axes[0])
        drawn = {split: curves(runs, split) for split in TITLES}
        for ax, (split, lines) in zip(axes, drawn.items(), strict=False):
            panel(ax, lines, TITLES[split])
        if asked:
            panel(axes[2], curves(runs, "accuracy"), "Test accuracy")
            accuracy_axis(axes[2])
            axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # losses go to 0
        axes[0].set_ylabel("cross-entropy, nats per token (log scale)")
        axes[0].set_ylim(*log_limits([line for lines in drawn.values() for line in lines]))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", title="final test loss")
        levels = any(len(line.tokens) == 1 for line in drawn["test"])
        explain(figure, note((len(line.seeds) for line in drawn["test"]), levels=levels))
        return save(figure, folder / "figure")


def explain(figure: Figure, words: str) -> None:
    """Write below a figure what its lines and bands are."""
    figure.supxlabel(words, fontsize="small", color="0.35")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``; return their paths."""
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        with file_aside(path) as aside:
            figure.savefig(aside, format=path.suffix[1:], dpi=200, metadata=metadata)
    return paths


def panel(ax: Axes, lines: list[Curve], title: str) -> None:
    """Draw curves with their seeds or bands into ``ax``; the lowest is first in the legend."""
    looks = styles(line.variant for line in lines)
    for line in sorted(lines, key=lambda line: line.last):
        look = looks[line.variant]
        ax.plot(
            line.tokens / 1e6,
            line.mean,
            color=look.color,
            linestyle=look.dashes,
            linewidth=1.4,
            marker="o" if len(line.tokens) < 20 else None,
            markersize=3,
            label=f"{line.variant}  {line.last:.3f}",
        )
        if len(line.tokens) == 1:  # a single value has no curve: a line shows its height
            ax.axhline(line.mean[0], color=look.color, linestyle=look.dashes, linewidth=0.8)
        for losses in line.single:
            ax.plot(line.tokens / 1e6, losses, color=look.color, linewidth=0.6, alpha=0.6)
        if line.has_band:
            ax.fill_between(
                line.tokens / 1e6, line.low, line.high, color=look.color, alpha=0.15, linewidth=0
            )
    ax.set_title(title)
    ax.set_xlabel("training tokens (millions)")
    loss_axis(ax)


def accuracy_axis(ax: Axes) -> None:
    """Show shares from 0 to 1."""
    ax.set_yscale("linear")
    ax.set_ylim(-0.03, 1.05)
    ax.set_ylabel("share of right answers")


def loss_axis(ax: Axes) -> None:
    """Make the vertical axis logarithmic, with round numbers."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelleft=True)


def log_limits(lines: list[Curve]) -> tuple[float, float]:
    """Limits of the loss axis that show every line after its steep start; bands may be cut."""
    shown = np.concatenate(
        [
            losses[line.tokens >= _START * line.tokens[-1]]
            for line in lines
            for losses in (line.mean, *line.single)
        ]
    )
    return 0.97 * float(np.nanmin(shown)), 1.03 * float(np.nanmax(shown))


def label_ends(
    ax: Axes, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, Style]
) -> None:
    """Write the name of each line beside its end, so far apart that no two names overlap.

    The scale and the limits of ``ax`` must be final.
    """
    places = ax.transScale + ax.transLimits
    found = {name: float(places.transform(end)[1]) for name, end in ends.items()}
    ordered = sorted(found, key=lambda name: found[name])
    heights = np.array([found[name] for name in ordered])
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + _APART)
    if len(heights):  # as far down as they went up
        heights -= max(0.0, (heights[-1] - 1.0) / 2)
    for name, height in zip(ordered, heights, strict=True):
        color = looks[name].color
        ax.annotate(
            name,
            ends[name],
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize="x-small",
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6},
        )
