"""How forgiving each attention is: its result against a setting, from the trials of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from softmax_rnn.report.figure import explain, label_ends, save
from softmax_rnn.report.style import LOOK, styles
from softmax_rnn.report.sweeps import SweepRecord, Trial


def draw_sweep(columns: Mapping[str, SweepRecord], title: str, stem: Path) -> list[Path]:
    """The result of every variant against the setting; writes PNG and SVG.

    ``columns`` are records by the title of their panel. On a task the result is the accuracy.
    """
    with mpl.rc_context(LOOK):
        width = 5.2 * len(columns)
        figure = Figure(figsize=(max(width, 6.4), 4.2), layout="constrained")
        axes = figure.subplots(1, len(columns), squeeze=False)[0]
        for ax, (name, record) in zip(axes, columns.items(), strict=True):
            _panel(ax, record, name)
        figure.suptitle(title)
        words = "One trial per point, with seed 0. A circle marks the value that was chosen."
        explain(figure, words)
        return save(figure, stem)


def _panel(ax: Axes, record: SweepRecord, title: str) -> None:
    names = list(dict.fromkeys(trial["variant"] for trial in record["trials"]))
    asked = all(trial["accuracy"] is not None for trial in _finished(record["trials"]))
    looks, ends = styles(names), {}
    for name in names:
        trials = _finished([trial for trial in record["trials"] if trial["variant"] == name])
        trials.sort(key=lambda trial: trial["value"])
        if not trials:
            continue
        values: list[Any] = [trial["value"] for trial in trials]
        found = [float(trial["accuracy" if asked else "loss"] or 0.0) for trial in trials]
        look = looks[name]
        ax.plot(
            values, found, color=look.color, linestyle=look.dashes, marker="o", markersize=2.5,
            linewidth=1.3,
        )  # fmt: skip
        ends[name] = values[-1], found[-1]
        best: Any = record["chosen"].get(name)
        if best in values:
            ax.plot(
                best, found[values.index(best)], "o", color=look.color, markersize=8,
                markerfacecolor="none",
            )  # fmt: skip
    ax.set_title(title)
    ax.set_xlabel(f"{record['setting'].replace('_', ' ')} (log scale)")
    ax.set_xscale("log")
    ax.set_xticks(sorted({trial["value"] for trial in _finished(record["trials"])}))
    ax.xaxis.set_major_formatter("{x:.3g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", labelrotation=30)
    ax.set_ylabel("validation accuracy" if asked else "validation loss, nats per token")
    label_ends(ax, ends, looks)


def _finished(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial["loss"] is not None]
