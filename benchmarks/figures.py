"""Figures of the benchmarks: time, memory and speed against the length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from softmax_rnn._utils.files import file_aside
from softmax_rnn.report.style import LOOK, style

Result = Mapping[str, Any]
Row = Mapping[str, Any]

# Styles of rows that are not variants: colour, dashes, marker. Grey lines are below the others.
_GREY, _PURPLE, _ORANGE, _SKY = "#8c8c8c", "#CC79A7", "#E69F00", "#56B4E9"
_LOOKS = {
    "sdpa": (_GREY, "-", ""),
    "llama": (_GREY, "-", ""),
    "llama materialised": (_GREY, ":", "x"),
    "power:2": (_PURPLE, "--", "v"),
    "flash-linear-attention": (_ORANGE, ":", "P"),
    "power-attention": (_SKY, ":", "*"),
}
_MARKERS = {"norm": "s", "gate": "D", "linear_elu": "v", "taylor:2": "^", "taylor:10": "^"}


def draw_op(result: Result, path: Path) -> None:
    """Time and memory against T, a row of panels for each width."""
    widths = list(dict.fromkeys(row["width"] for row in result["rows"]))
    panels = [
        (f"Time, forward and backward (D={width})", "milliseconds", _milliseconds, width)
        for width in widths
    ]
    panels += [
        (f"Peak memory above the inputs (D={width})", "MiB", _extra, width) for width in widths
    ]
    _draw(result, panels, "width", "T, tokens", path)


def draw_decode(result: Result, path: Path) -> None:
    """Tokens a second and bytes of the cache against the prompt."""
    panels = [
        ("Decoding, one token after another", "tokens per second", _tokens, None),
        ("Cache after the prompt", "MiB", _cache, None),
    ]
    alone = {**result, "rows": [row for row in result["rows"] if row.get("batch", 1) == 1]}
    _draw(alone, panels, None, "tokens of the prompt", path)


def _milliseconds(row: Row) -> float:
    return 1e3 * float(row["seconds"]["median"])


def _extra(row: Row) -> float:
    return max(row["peak_extra_bytes"] / 2**20, 0.1)


def _cache(row: Row) -> float:
    return float(row["cache_bytes"]) / 2**20


def _tokens(row: Row) -> float:
    return float(row["tokens_per_second"])


def _draw(
    result: Result,
    panels: Sequence[tuple[str, str, Callable[[Row], float], Any]],
    field: str | None,
    xlabel: str,
    path: Path,
) -> None:
    rows, columns = -(-len(panels) // 2), 2
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.0, 3.8 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
        # Column by column: with two widths, time is on the left and memory on the right.
        for ax, (title, ylabel, value, where) in zip(axes.T.flat, panels, strict=True):
            here = [row for row in result["rows"] if field is None or row[field] == where]
            _panel(ax, here, value)
            ax.set_title(title)
            ax.set_ylabel(ylabel)
        for ax in axes[-1]:
            ax.set_xlabel(xlabel)
        lines: dict[str, Any] = {}
        for ax in axes.flat:
            for line, label in zip(*ax.get_legend_handles_labels(), strict=True):
                lines.setdefault(label, line)
        figure.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_aside(path) as aside:
            figure.savefig(aside, format="png", dpi=160)


def _panel(ax: Axes, rows: Sequence[Row], value: Callable[[Row], float]) -> None:
    lengths = sorted({row["length"] for row in rows})
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        color, dashes, marker = _look(name)
        plain = color == _GREY and not marker
        ax.loglog(
            [row["length"] for row in own],
            [value(row) for row in own],
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=4,
            markerfacecolor="white",
            linewidth=5 if plain else 1.4,
            alpha=0.55 if plain else 1,
            zorder=1 if plain else 2,
            label=name,
        )
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    ax.grid(alpha=0.3, linewidth=0.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _look(name: str) -> tuple[str, str, str]:
    """Colour, dashes and marker; N x N weights have the variant's colour, dotted."""
    if name in _LOOKS:
        return _LOOKS[name]
    for prefix in ("sdpa ", "power-attention "):
        if name.startswith(prefix):
            color, _, marker = _LOOKS[prefix.strip()]
            return color, ":", marker or "."
    if name.startswith("materialised "):
        return _look(name.partition(" ")[2])[0], ":", "x"
    found = style(name)
    return found.color, found.dashes, _MARKERS.get(name, "o")
