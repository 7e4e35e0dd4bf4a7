"""A figure of variants whose states differ in size: loss against that size, and against tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from softmax_rnn.report.curves import Curve, mean_curve, note, seed_interval
from softmax_rnn.report.figure import explain, label_ends, loss_axis, save
from softmax_rnn.report.memory import LayerMemory, layer_memory
from softmax_rnn.report.style import LOOK, Style, styles
from softmax_rnn.report.table import REFERENCE, by_variant
from softmax_rnn.training.folder import RunFolder

_HEIGHT, _NAME = 300, 9  # of the axes and of a name, in points
_START = 0.15  # share of a run that is not drawn: there the losses fall steeply
_MARKERS = {"state": "o", "cache": "o", "window": "s", "state and window": "s"}
_KINDS = {
    "state": "state of a finite series",
    "cache": "keys and values of all tokens",
    "window": "keys and values of a window",
    "state and window": "state, and keys and values of a window",
}
_FADING, _FIXED, _GROWING = "a state that fades", "a state that does not", "keys and values"


def draw_states(runs: Sequence[RunFolder], title: str, stem: Path) -> list[Path]:
    """Test loss against the state; below, minus softmax's, against tokens; writes PNG and SVG."""
    grouped = by_variant(runs)
    memories = {
        name: layer_memory(next(iter(seeds.values())).new_model) for name, seeds in grouped.items()
    }
    groups: dict[str, list[Curve]] = {_FADING: [], _FIXED: [], _GROWING: []}
    for name, seeds in grouped.items():
        if name != REFERENCE:
            run = next(iter(seeds.values()))
            group = _group(memories[name], run.new_model.spec.decay != "none")
            groups[group].append(_difference(name, seeds, grouped.get(REFERENCE, {})))
    groups = {name: lines for name, lines in groups.items() if lines}
    looks = styles(grouped)
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(10.5, 8.4 if groups else 5.0), layout="constrained")
        ratios = [3, 2] if groups else [1]
        above, *below = figure.subfigures(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
        _losses(above.subplots(), grouped, memories, looks)
        if groups:
            axes = below[0].subplots(1, len(groups), squeeze=False, sharey=True)[0]
            for ax, (name, lines) in zip(axes, groups.items(), strict=True):
                _lines(ax, lines, name, looks)
            for ax, lines in zip(axes, groups.values(), strict=True):  # now that all have one scale
                ends = {line.variant: (line.tokens[-1] / 1e6, line.last) for line in lines}
                label_ends(ax, ends, looks)
            against = f" minus {REFERENCE}'s" if REFERENCE in grouped else ""
            axes[0].set_ylabel(f"test loss{against}, nats per token")
        figure.suptitle(title)
        words = note((len(seeds) for seeds in grouped.values()), single="Thin lines")
        tokens = runs[0].config.block_size
        explain(
            figure,
            f"{words} Above: what one layer keeps after {tokens:,} tokens, in float32;\nif the "
            "marker is hollow, it grows with the sequence.",
        )
        return save(figure, stem)


def _group(memory: LayerMemory, fades: bool) -> str:
    """Beside which other variants one is drawn."""
    if "state" not in memory.kind:
        return _GROWING
    return _FADING if fades else _FIXED


def _difference(
    variant: str, seeds: Mapping[int, RunFolder], reference: Mapping[int, RunFolder]
) -> Curve:
    """The test loss of each seed, minus that of the reference with the same seed if there is one.

    Both are of the same steps, after the steep start.
    """
    found = []
    for seed, run in seeds.items():
        points = run.evaluations.set_index("step")
        loss = points.test_loss
        if reference:
            if seed not in reference:
                continue
            loss = loss - reference[seed].evaluations.set_index("step").test_loss
        shown = pd.DataFrame({"tokens": points.tokens, "loss": loss}).dropna()
        found.append(shown[shown.index >= _START * shown.index.max()].reset_index(drop=True))
    return mean_curve(variant, found)


def _lines(ax: Axes, lines: Sequence[Curve], title: str, looks: Mapping[str, Style]) -> None:
    """Draw the curves of a group."""
    for line in lines:
        look, tokens = looks[line.variant], line.tokens / 1e6
        ax.plot(tokens, line.mean, color=look.color, linestyle=look.dashes, linewidth=1.4)
        for losses in line.single:
            ax.plot(tokens, losses, color=look.color, linewidth=0.6, alpha=0.6)
        if line.has_band:
            ax.fill_between(tokens, line.low, line.high, color=look.color, alpha=0.12, linewidth=0)
    ax.axhline(0, color="0.2", linewidth=0.8)
    ax.set_title(title)
    ax.set_xlabel("training tokens (millions)")


def _losses(
    ax: Axes,
    grouped: Mapping[str, Mapping[int, RunFolder]],
    memories: Mapping[str, LayerMemory],
    looks: Mapping[str, Style],
) -> None:
    """Draw the final test loss of each variant against the bytes that a layer keeps."""
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
            xytext=(8, shift - 3),
            textcoords="offset points",
            fontsize="small",
            color=looks[variant].color,
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    loss_axis(ax)
    ax.margins(x=0.2)  # for the names
    ax.set_ylabel("final test loss, nats per token (log scale)")
    ax.set_xlabel("KiB per layer and sequence (log scale)")
    kinds = {memory.kind for memory in memories.values()}
    ax.legend(handles=[_key(kind) for kind in _KINDS if kind in kinds], fontsize="small")


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
