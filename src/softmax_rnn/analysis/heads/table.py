"""The table of an analysis for the terminal."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd
from rich.table import Table

from softmax_rnn.analysis.heads.result import Analysis
from softmax_rnn.analysis.heads.terms import ORDERS, PERCENTILE
from softmax_rnn.analysis.heads.weights import RECENT_KEYS
from softmax_rnn.report.terminal import terminal_table

_MAX_ROWS = 40  # with more heads there is a row per layer
# Title and format of each column; those of powers come between the two parts.
_SCORES = {
    "max_score": ("max |s|", "{:.2f}"),
    "p99_score": (f"{PERCENTILE}% |s|", "{:.2f}"),
    "score_range": ("range", "{:.1f}"),
}
_REST = {
    "sink_share": ("first", "{:.1%}"),
    "recent_share": (f"last {RECENT_KEYS}", "{:.1%}"),
    "effective_keys": ("keys", "{:.1f}"),
    "order_bound": ("order by bound", "{}"),
    "order_needed": ("Taylor", "{}"),
    "order_shifted": ("shifted", "{}"),
    "effective_order": ("effective", "{}"),
}
_HEADS_ONLY = ("p99_score", "order_bound")  # as are powers: not in rows of layers


def table(analysis: Analysis) -> Table:
    """One row per head; of a large model one per layer, with the range over its heads."""
    heads, columns, keys = analysis.heads, {**_SCORES, **_REST}, ["layer", "head"]
    if len(heads) > _MAX_ROWS:
        columns = {name: x for name, x in columns.items() if name not in _HEADS_ONLY}
        keys = ["layer"]
    else:
        kept = min(analysis.order, 2)
        powers = analysis.powers.pivot_table(index=keys, columns="power", values="pair_share")
        powers = powers.iloc[:, : kept + 1].add_prefix("power ")
        powers[f"{kept + 1} and up"] = (1 - powers.sum(axis=1)).clip(lower=0)
        heads = heads.merge(powers, on=keys)
        columns = {**_SCORES, **{str(name): (str(name), "{:.1%}") for name in powers}, **_REST}
    beyond = dict.fromkeys(ORDERS, f"> {analysis.max_order}")

    def cell(name: str, values: pd.Series) -> str:
        shown = columns[name][1]
        ends = [shown.format(x) for x in (values.min(), values.max()) if not pd.isna(x)]
        if values.isna().any():
            ends = [*ends[:1], beyond.get(name, "-")]
        return " to ".join(dict.fromkeys(ends))

    rows = (
        [*map(str, key), *(cell(name, group[name]) for name in columns)]
        for key, group in heads.groupby(keys)
    )
    found = terminal_table((*keys, *(title for title, _ in columns.values())), rows)
    found.caption = _caption(analysis, columns)
    return found


def _caption(analysis: Analysis, columns: Collection[str]) -> str:
    counts = analysis.heads.groupby("layer").size()
    heads = " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
    by_layer = "order_bound" not in columns
    parts = (
        analysis.note,
        f"The {heads} heads of each layer, lowest to highest." if by_layer else "",
        f"s: the scores on {analysis.tokens:,} tokens.",
        "range: the largest minus the smallest score of a row, mean over rows.",
        "" if by_layer else "power n: the share of |s|^n / n! in exp(|s|), mean over pairs.",
        "first: the weight of the first token, mean over the rows after it.",
        f"last {RECENT_KEYS}: that of the last {RECENT_KEYS} tokens.",
        "keys: so many keys of equal weight have the same entropy.",
        "" if by_layer else "order by bound: of the Taylor series, for any scores up to max |s|.",
        f"Orders: the lowest whose output on this text is within {analysis.tolerance:g} of "
        "softmax's. Taylor: of the series about 0. shifted: about the middle of each row's scores. "
        "effective: of the Chebyshev series on the range of each row's scores.",
    )
    return " ".join(filter(None, parts))
