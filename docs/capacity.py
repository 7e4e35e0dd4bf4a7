"""Make the tables of capacity.md: ``python docs/capacity.py`` (two to three minutes on a core)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

import softmax_rnn as sr
from softmax_rnn._utils.files import write_text
from softmax_rnn.analysis.capacity import (
    capacity,
    effective_features,
    largest_rank,
    learned_recall,
    random_recall,
)
from softmax_rnn.report import markdown

PAGE = Path(__file__).parent / "capacity.md"
ORDERS, WIDTHS, VALUE_WIDTH = range(1, 5), (4, 8, 16, 32, 64), 64
VALUES = 16
SETTINGS = (
    ("power:1", 8, 1.0),
    ("power:1", 16, 1.0),
    ("power:2", 4, 1.0),
    ("power:2", 8, 1.0),
    ("power:3", 4, 1.0),
    ("power:4", 4, 1.0),
    ("taylor:2", 8, 12.0),
    ("softmax", 8, 4.0),
)
TASK_WIDTHS = (2, 4, 8, 16, 32)


def counts() -> str:
    """Monomials of one power, of all powers, and the bytes of a head's state."""
    rows = []
    for width in WIDTHS:
        cells = []
        for order in ORDERS:
            one, all_ = (largest_rank(f"{name}:{order}", width) for name in ("power", "taylor"))
            kib = 4 * sr.state_size(f"taylor:{order}", width, VALUE_WIDTH) / 1024
            cells.append(f"{one:,} / {all_:,} ({kib:,.0f} KiB)")
        rows.append([str(width), *cells])
    return markdown.table(["d", *(f"N = {n}" for n in ORDERS)], rows)


def features() -> str:
    """Effective features of the series, against the rank."""
    rows = []
    for width in WIDTHS:
        for order in ORDERS:
            best = minimize_scalar(
                lambda s, n=order, d=width: -effective_features(f"taylor:{n}", d, s),
                bounds=(0.1, 100.0),
                method="bounded",
            )
            power = effective_features(f"power:{order}", width)
            sphere = largest_rank(sr.AttentionSpec("cosine", "taylor", order), width)
            numbers = (largest_rank(f"taylor:{order}", width), sphere, -best.fun, power)
            rows.append([str(width), str(order), *(f"{x:,.0f}" for x in numbers), f"{best.x:.0f}"])
    names = ["M", "M of keys of one length", "`taylor:N`, best score", "`power:N`", "best score"]
    return markdown.table(["d", "N", *names], rows, left=2)


def knees() -> str:
    """Pairs at which half of the answers are right: the estimate, random keys, learned keys."""
    rows = []
    for name, width, score in SETTINGS:
        finite = sr.variant(name).has_state
        rank = largest_rank(name, width) if finite else None
        useful = effective_features(name, width, score)
        random = partial(_random, name, width, score)
        pairs = [
            f"{1 + capacity(useful, VALUES, accuracy):.0f} / {_knee(random, accuracy):.0f}"
            for accuracy in (0.99, 0.5)
        ]
        learned = _knee(partial(_learned, name, width), 0.5) if rank else math.inf
        last = [f"{learned:.0f}", f"{learned / rank:.1f}"] if rank else ["", ""]
        rows.append([f"`{name}`", str(width), str(rank or "none"), f"{useful:.0f}", *pairs, *last])
    names = ["99%: estimate / random keys", "50%: estimate / random keys", "50%: learned keys"]
    return markdown.table(["weight", "d", "M", "M_eff", *names, "learned / M"], rows)


def task() -> str:
    """The accuracy of each layer's part of the recall task, with learned queries and keys."""
    parts = {
        "first, keys alone": {"pairs": 16, "values": 63, "spacing": 2, "value_width": 64},
        "first, all tokens": {"pairs": 32, "values": 128, "spacing": 1, "value_width": 64},
        "second": {"pairs": 16, "values": 64, "keys": 63, "value_width": 64},
        "second, 32 value channels": {"pairs": 16, "values": 64, "keys": 63, "value_width": 32},
    }
    rows = []
    for part, options in parts.items():
        for order in ORDERS:
            find = partial(learned_recall, f"taylor:{order}", distinct=True, steps=250)
            cells = [f"{find(width, **options):.2f}" for width in TASK_WIDTHS]
            rows.append([part, str(order), *cells])
    return markdown.table(["layer", "N", *(f"d = {d}" for d in TASK_WIDTHS)], rows, left=2)


def _random(name: str, width: int, score: float, pairs: int) -> float:
    return random_recall(name, width, pairs, VALUES, score=score)


def _learned(name: str, width: int, pairs: int) -> float:
    return learned_recall(name, width, pairs, VALUES, steps=150)


def _knee(measure: Callable[[int], float], accuracy: float) -> float:
    """The number of pairs at which the accuracy falls to ``accuracy``, by interpolation."""
    pairs, measured = [2], [1.0]
    while measured[-1] > accuracy:
        pairs.append(max(pairs[-1] + 1, round(pairs[-1] * 1.5)))
        measured.append(measure(pairs[-1]))
    falling = np.minimum.accumulate(measured)[-2:]
    return float(np.exp(np.interp(accuracy, falling[::-1], np.log(pairs[-2:])[::-1])))


def fill(page: str) -> str:
    """The page with the tables that no simulation makes replaced."""
    return markdown.fill(page, {"counts": counts(), "features": features()})


def fill_simulated(page: str) -> str:
    """The page with the tables of the simulations replaced."""
    return markdown.fill(page, {"knees": knees(), "task": task()})


if __name__ == "__main__":
    write_text(PAGE, fill_simulated(fill(PAGE.read_text(encoding="utf-8"))))
