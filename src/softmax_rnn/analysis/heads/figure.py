"""A figure of an analysis: the shares of the powers, and the orders that each head needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from softmax_rnn.analysis.heads.result import Analysis
from softmax_rnn.report.figure import save
from softmax_rnn.report.style import LOOK

_LOWEST = -6.0  # the lowest log10 share with a colour of its own
_MAX_LABELS = 48  # with more heads, only layers are labelled
_BLUE, _ORANGE, _VERMILION = "#0072B2", "#E69F00", "#D55E00"
# Label, marker, fill and edge of each order; later ones are drawn above earlier ones.
_ORDERS = {
    "order_bound": ("by the remainder bound at max |s|", "D", "white", _VERMILION),
    "order_needed": ("Taylor series", "s", _ORANGE, _ORANGE),
    "order_shifted": ("Taylor series about the middle of each row", "o", "none", _BLUE),
    "effective_order": ("effective order", "o", _BLUE, _BLUE),
}


def draw(analysis: Analysis, folder: Path, *, title: str = "") -> list[Path]:
    """Write ``analysis.png`` and ``analysis.svg`` into ``folder``; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = len(analysis.heads)
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(11.0, min(14.0, max(3.2, 1.9 + 0.2 * rows))), layout="constrained")
        axes = figure.subplots(1, 3, sharey=True)
        _draw_shares(figure, axes[:2], analysis)
        _draw_orders(axes[2], analysis)
        figure.legend(loc="outside lower right", ncols=5, frameon=False)
        if heading := "\n".join(filter(None, (title, analysis.note))):
            figure.suptitle(heading, fontsize=10, parse_math=False)
        return save(figure, folder / "analysis")


def _draw_shares(figure: Figure, axes: Sequence[Axes], analysis: Analysis) -> None:
    """The heat maps: one row per head, one column per power."""
    layers = analysis.heads["layer"].to_numpy()
    firsts = np.flatnonzero(np.diff(layers, prepend=-1))
    with np.errstate(divide="ignore"):  # a share may be 0
        pair_shares = np.log10(analysis.powers["pair_share"].to_numpy())
    drawn = {
        "Share of a power: sums over pairs": analysis.powers["log10_share"].to_numpy(),
        "Share of a power: mean over pairs": pair_shares,
    }
    largest = analysis.heads["max_score"].max()
    for ax, (title, shares) in zip(axes, drawn.items(), strict=True):
        if shares.max() < _LOWEST:  # the map would have a single colour
            shares = np.full_like(shares, np.nan)
            words = (
                f"Not drawn: every share up to\npower {analysis.order} is below 1e{_LOWEST:g}. "
                f"The largest\nterms of a score of {largest:,.0f} are\nnear power {largest:,.0f}."
            )
            ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center")
        image = ax.imshow(
            np.maximum(shares, 2 * _LOWEST).reshape(len(layers), -1),
            aspect="auto",
            cmap="cividis",
            vmin=_LOWEST,
            vmax=0,
            interpolation="nearest",
        )
        ax.grid(False)
        ax.set_title(title)
        ax.set_xlabel("power n: |s|ⁿ/n! in exp(|s|)")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
        for first in firsts[1:]:
            ax.axhline(first - 0.5, color="white", linewidth=1.5)
    bar = figure.colorbar(image, ax=axes[0], extend="min", location="left", fraction=0.07)
    bar.set_label("log10 of the share")
    every = len(layers) <= _MAX_LABELS
    ticks = np.arange(len(layers)) if every else firsts
    names = zip(layers[ticks], analysis.heads["head"].to_numpy()[ticks], strict=True)
    axes[0].set_yticks(ticks, [f"{layer}.{head}" if every else f"{layer}" for layer, head in names])
    axes[0].set_ylabel("layer.head" if every else "layer")


def _draw_orders(ax: Axes, analysis: Analysis) -> None:
    """The orders that each head needs on this text, and the order by the remainder bound."""
    rows = np.arange(len(analysis.heads))
    orders = analysis.heads[list(_ORDERS)].to_numpy(dtype=float, na_value=np.nan)
    size = 30 if len(rows) <= _MAX_LABELS else 10
    known = ~np.isnan(orders).all(1)
    lowest, highest = np.nanmin(orders[known], axis=1), np.nanmax(orders[known], axis=1)
    ax.hlines(rows[known], lowest, highest, color="0.7", linewidth=1, zorder=1)
    for values, (label, marker, fill, edge) in zip(orders.T, _ORDERS.values(), strict=True):
        style: dict[str, Any] = {"s": size, "facecolor": fill, "edgecolor": edge, "zorder": 2}
        ax.scatter(values, rows, marker=marker, label=label, **style)
        if label != _ORDERS["order_bound"][0]:
            beyond = rows[np.isnan(values)]
            ax.scatter(np.full(len(beyond), analysis.max_order), beyond, marker=">", **style)
    if np.isnan(orders[:, 1:]).any():
        label = f"more than {analysis.max_order}"
        ax.scatter([], [], size, marker=">", facecolor="white", edgecolor="0.3", label=label)
    ax.set_title(f"Order within {analysis.tolerance:g} of softmax")
    ax.set_xlabel("order of the series")
    ax.margins(x=0.05)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(labelleft=True)
