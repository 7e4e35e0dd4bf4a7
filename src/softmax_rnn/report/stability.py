"""How stable each attention is: final loss, and loss spikes, against the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from softmax_rnn.report.figure import explain, label_ends, loss_axis, save
from softmax_rnn.report.grid import Column
from softmax_rnn.report.style import LOOK, Style, styles
from softmax_rnn.report.table import by_variant
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.metrics import loss_spikes

_ROWS = {"loss": "final test loss, nats per token", "spikes": "loss spikes in a run"}


def stability_table(columns: Sequence[Column]) -> pd.DataFrame:
    """A row for each panel, variant and learning rate.

    The columns are panel, variant, learning_rate, seeds, loss (mean over the runs that finished;
    NaN without any), spikes (mean over the runs), skipped (steps without an update, of all runs)
    and diverged (runs).
    """
    rows = []
    for column in columns:
        for variant, seeds in by_variant(column.runs).items():
            for rate in sorted({run.new_model.learning_rate for run in column.runs}):
                runs = [run for run in seeds.values() if run.new_model.learning_rate == rate]
                if runs:
                    rows.append({"panel": column.title, "variant": variant, **_row(runs, rate)})
    return pd.DataFrame(rows)


def _row(runs: Sequence[RunFolder], rate: float) -> dict[str, float]:
    finished = [run.summary["test_loss"] for run in runs if run.finished]
    events = [row["event"] for run in runs for row in run.events]
    return {
        "learning_rate": rate,
        "seeds": len(runs),
        "loss": float(np.mean(finished)) if finished else np.nan,
        "spikes": float(np.mean([loss_spikes(run.metrics.loss) for run in runs])),
        "skipped": events.count("non_finite"),
        "diverged": len(runs) - len(finished),
    }


def draw_stability(columns: Sequence[Column], title: str, stem: Path) -> list[Path]:
    """Loss above spikes, against the learning rate, a column for each title; writes PNG and SVG.

    Columns of one title, which differ in their learning rate, are drawn together. Their runs are
    finished or diverged.
    """
    table = stability_table(columns)
    looks = styles(table.variant.unique())
    panels = list(dict.fromkeys(table.panel))
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(2.9 * len(panels) + 1.4, 5.4), layout="constrained")
        axes = figure.subplots(
            len(_ROWS), len(panels), squeeze=False, sharex=True, sharey="row", height_ratios=[2, 1]
        )
        for column, name in enumerate(panels):
            for row, quantity in enumerate(_ROWS):
                _panel(axes[row, column], table[table.panel == name], quantity, looks)
            axes[0, column].set_title(name)
            axes[-1, column].set_xlabel("learning rate (log scale)")
        for row, words in zip(axes[:, 0], _ROWS.values(), strict=True):
            row.set_ylabel(words)
        loss_axis(axes[0, 0])
        axes[1, 0].set_ylim(bottom=-0.1, top=max(1.0, 1.1 * table.spikes.max()))
        _label(axes[0, -1], table[table.panel == panels[-1]], looks)
        figure.suptitle(title)
        seeds = sorted(set(table.seeds))
        words = f"Means over {' or '.join(map(str, seeds))} seeds." if seeds != [1] else "One seed."
        if table.diverged.any():
            words += " A cross marks rates at which a run diverged; its loss is that of the others."
        explain(figure, words)
        return save(figure, stem)


def _panel(ax: Axes, table: pd.DataFrame, quantity: str, looks: Mapping[str, Style]) -> None:
    for name, rows in table.groupby("variant", sort=False):
        look = looks[str(name)]
        ax.plot(
            rows.learning_rate, rows[quantity], color=look.color, linestyle=look.dashes,
            marker="o", markersize=2.5, linewidth=1.3,
        )  # fmt: skip
        lost = rows[(rows.diverged > 0) & rows[quantity].notna()]
        ax.plot(lost.learning_rate, lost[quantity], "x", color=look.color, markersize=7)
    ax.set_xscale("log")
    ax.set_xticks(sorted(set(table.learning_rate)))
    ax.xaxis.set_major_formatter("{x:.3g}")
    ax.xaxis.set_minor_locator(NullLocator())


def _label(ax: Axes, table: pd.DataFrame, looks: Mapping[str, Style]) -> None:
    """Name the lines of the last panel of losses."""
    ends = {}
    for name, rows in table[table.loss.notna()].groupby("variant", sort=False):
        ends[str(name)] = rows.learning_rate.iloc[-1], rows.loss.iloc[-1]
    label_ends(ax, ends, looks)
