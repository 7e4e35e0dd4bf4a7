"""Make the tables and the figure of recurrent.md: ``python docs/recurrent.py``."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

import softmax_rnn as sr
from softmax_rnn._utils.files import write_text
from softmax_rnn.ops.monomials import cumulative_dimension
from softmax_rnn.report import markdown

HERE = Path(__file__).parent
WIDTHS, ORDERS, RADII = (8, 16, 32, 64, 128), range(1, 7), (1.0, 2.0, 5.0)
STATE_BYTES, CACHE_BYTES = 4, 2  # a float32 state, a bfloat16 cache
COLORS = ("#0072B2", "#D55E00", "#009E73")


def states() -> str:
    """Monomials, and the context from which the state is smaller than a key/value cache."""
    lines = ["| d | " + " | ".join(f"order {n}" for n in ORDERS) + " |", "|---" * 7 + "|"]
    for width in WIDTHS:
        cells = []
        for order in ORDERS:
            spec = sr.variant("taylor", order=order)
            state = sr.state_size(spec, width, width) * STATE_BYTES
            beats = state // (2 * width * CACHE_BYTES) + 1
            cells.append(f"{cumulative_dimension(width, order):,} ({_short(beats)})")
        lines.append(f"| {width} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def orders() -> str:
    """The order that a tolerance needs, by the remainder bound."""
    tolerances = (1e-1, 1e-2, 1e-3, 1e-6)
    lines = [
        "| scores up to | " + " | ".join(f"within {t:g}" for t in tolerances) + " |",
        "|---" * (len(tolerances) + 1) + "|",
    ]
    for radius in (*RADII, 10.0):
        cells = (str(sr.order_for(tolerance, radius)) for tolerance in tolerances)
        lines.append(f"| {radius:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fits() -> str:
    """Errors of Taylor's and of the best polynomial, relative to the largest weight."""
    shown = (2, 4, 6, 8)
    rows = []
    for radius in RADII:
        cells, scores = [], np.linspace(-radius, radius, 10_001)
        for order in shown:
            best = np.polynomial.Polynomial(sr.fit_series(order, radius))
            error = np.abs(best(scores) - np.exp(scores)).max()
            pair = (x / math.exp(radius) for x in (sr.remainder_bound(order, radius), error))
            cells.append(" / ".join(f"{x:.1e}" for x in pair))
        rows.append([f"{radius:g}", *cells])
    names = [f"order {n}: Taylor / best" for n in shown]
    return markdown.table(["scores up to", *names], rows, left=len(shown) + 1)


def crossovers() -> str:
    """The length from which auto takes chunked."""
    shown = (1, 2, 3, 4)
    lines = ["| d | " + " | ".join(f"order {n}" for n in shown) + " |", "|---" * 5 + "|"]
    for width in WIDTHS[:-1]:
        specs = (sr.variant("taylor", order=n) for n in shown)
        lengths = (sr.crossover(spec, width, width) for spec in specs)
        lines.append(f"| {width} | " + " | ".join(_short(length) for length in lengths) + " |")
    return "\n".join(lines)


def errors(radius: float, last: int = 20) -> list[float]:
    """The largest error of Taylor attention's output against softmax, scores in [-radius, radius].

    Values are in [-1, 1]. If the row sum of an order crosses zero, its error is not bounded.
    """
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 256, 16, generator=draw, dtype=torch.float64)
    scale = radius / float((q @ k.mT).abs().max())
    v = 2 * torch.rand(1, 1, 256, 16, generator=draw, dtype=torch.float64) - 1
    exact = sr.attention(q, k, v, sr.AttentionSpec(scale=scale), form="dense")
    found = []
    for order in range(last + 1):
        spec = sr.AttentionSpec(series="taylor", order=order, scale=scale)
        found.append(float((sr.attention(q, k, v, spec) - exact).abs().max()))
    return found


def figure(path: Path) -> None:
    """Error against order: the bound on a weight's error, and the error of attention's output."""
    with mpl.rc_context({"font.size": 9}):
        drawing = Figure(figsize=(9.0, 3.6), layout="constrained")
        left, right = drawing.subplots(1, 2, sharex=True)
        for radius, color in zip(RADII, COLORS, strict=True):
            label = f"|score| ≤ {radius:g}"
            bound = [sr.remainder_bound(n, radius) / math.exp(radius) for n in range(21)]
            left.semilogy(bound, color=color, marker="o", markersize=3, label=label)
            right.semilogy(errors(radius), color=color, marker="o", markersize=3, label=label)
        left.set_title("a weight: remainder bound / largest weight")
        right.set_title("attention's output: largest error, values in [-1, 1]")
        for ax in (left, right):
            ax.set_xlabel("order of the Taylor series")
            ax.set_ylim(1e-12, 100)
            ax.set_xticks(range(0, 21, 2))
            ax.grid(alpha=0.3, linewidth=0.5)
            for side in ("top", "right"):
                ax.spines[side].set_visible(False)
        left.legend(frameon=False)
        drawing.savefig(path, dpi=160)


def fill(page: str) -> str:
    """The page with every table replaced."""
    tables = {"states": states, "orders": orders, "fits": fits, "crossovers": crossovers}
    return markdown.fill(page, {name: make() for name, make in tables.items()})


def _short(number: int) -> str:
    """1,234 up to a million; then 1.2e+09."""
    return f"{number:,}" if number < 1_000_000 else f"{number:.1e}"


if __name__ == "__main__":
    figure(HERE / "images" / "recurrent_error.png")
    page = HERE / "recurrent.md"
    write_text(page, fill(page.read_text(encoding="utf-8")))
