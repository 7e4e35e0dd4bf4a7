"""A figure and a table of gaps to softmax against tokens, with their laws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from softmax_rnn._utils.files import write_text
from softmax_rnn.report.curves import seed_interval
from softmax_rnn.report.figure import explain, save
from softmax_rnn.report.laws import PAPER_TOKENS, Gap, gaps
from softmax_rnn.report.style import LOOK, styles
from softmax_rnn.training.folder import RunFolder

_NOTE = (
    "Dots are geometric means over seeds after the warm-up, bands 95% intervals over seeds. Only "
    "at the last dot has the learning rate decayed to zero. Right: the shaded tokens are measured."
)


def gap_table(found: Sequence[Gap]) -> pd.DataFrame:
    """One row per variant.

    Columns: variant; seeds; tokens (of training); gap, low and high (final gap in nats per token,
    with its 95% interval over seeds and test blocks); exponent, exponent_low and exponent_high (of
    the law); levels_off (whether the law has a constant); extrapolated, extrapolated_low and
    extrapolated_high (the gap at ``PAPER_TOKENS``, an extrapolation); reason (why there is no law).
    """
    rows = []
    for gap in found:
        law, final = gap.law, gap.final
        row: dict[str, Any] = {"variant": gap.variant, "seeds": len(gap.seeds)}
        row |= {"tokens": int(gap.last), "gap": final.mean, "low": final.low, "high": final.high}
        if law:
            for name, interval in (
                ("exponent", seed_interval(law.exponent)),
                ("extrapolated", law.gap(PAPER_TOKENS)),
            ):
                row[name], row[f"{name}_low"], row[f"{name}_high"] = map(float, interval)
        rows.append(row | {"levels_off": bool(law and law.levels_off), "reason": gap.reason})
    return pd.DataFrame(rows)


def draw_gaps(runs: Sequence[RunFolder], title: str, stem: Path) -> list[Path]:
    """Gaps against tokens with their laws, and the laws extrapolated; writes PNG, SVG and CSV."""
    found = gaps(runs)
    laws = [gap for gap in found if gap.law]
    looks = styles(gap.variant for gap in found)
    table = stem.with_suffix(".csv")
    write_text(table, gap_table(found).to_csv(index=False))
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(11.0, 4.4), layout="constrained")
        axes = figure.subplots(1, 2)
        for gap in sorted(laws, key=lambda gap: -gap.final.mean):
            color = looks[gap.variant].color
            _points(axes[0], gap, color)
            _law(axes[0], gap, color, gap.tokens[0], gap.last)
            _law(axes[1], gap, color, gap.tokens[0], PAPER_TOKENS)
        for gap in found:
            if not gap.law:
                label = f"{gap.variant}: {gap.reason}\n{gap.final}"
                axes[0].plot([], [], " ", label=label)
        for ax, ticks in zip(axes, ((1, 2, 5), (1,)), strict=True):
            if laws:  # an empty axis cannot be logarithmic
                ax.set_xscale("log")
                ax.set_yscale("log")
                for axis in (ax.xaxis, ax.yaxis):
                    axis.set_major_locator(LogLocator(subs=ticks, numticks=8))
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter(NullFormatter())
            ax.set_xlabel("training tokens (millions, log scale)")
        axes[0].set_ylabel("test loss minus softmax's, nats (log scale)")
        axes[0].set_title("Measured, with a power law")
        axes[1].set_title("Extrapolated to the paper's tokens")
        if laws:
            axes[1].axvspan(
                min(gap.tokens[0] for gap in laws) / 1e6, max(gap.last for gap in laws) / 1e6,
                color="0.9", zorder=0,
            )  # fmt: skip
        handles, labels = axes[0].get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside right upper")
        figure.suptitle(title)
        explain(figure, _NOTE)
        return [*save(figure, stem), table]


def _points(ax: Axes, gap: Gap, color: str) -> None:
    assert gap.law is not None
    exponent, low, high = seed_interval(gap.law.exponent)
    constant = ", and a constant" if gap.law.levels_off else ""
    label = f"{gap.variant}\nexponent {exponent:.2f} [{low:.2f}, {high:.2f}]{constant}"
    mean = np.exp(np.log(gap.seeds).mean(axis=0))
    ax.plot(gap.tokens / 1e6, mean, "o", color=color, markersize=3.5, label=label)


def _law(ax: Axes, gap: Gap, color: str, first: float, last: float) -> None:
    assert gap.law is not None
    tokens = np.geomspace(first, last, 200)
    mean, low, high = gap.law.gap(tokens)
    inside = tokens <= gap.last
    for shown, dashes in ((inside, "-"), (~inside, "--")):
        ax.plot(tokens[shown] / 1e6, mean[shown], color=color, linewidth=1.2, linestyle=dashes)
    ax.fill_between(tokens / 1e6, low, high, color=color, alpha=0.15, linewidth=0)
