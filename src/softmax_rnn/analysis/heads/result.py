"""The result of an analysis, and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from softmax_rnn._utils.files import write_json, write_text
from softmax_rnn.ops import AttentionSpec


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`softmax_rnn.analysis.heads.analyze.analyze`.

    Attributes:
        heads: one row per layer and head, with the columns ``layer``, ``head``, ``max_score`` (the
            largest |s|), ``p99_score`` (99th percentile of |s|), ``mean_score`` (mean of s),
            ``max_radius`` (half the range of a row's scores, the largest of all rows),
            ``order_needed`` (the lowest order whose mean ``error`` is within the tolerance; missing
            if no order up to ``max_order`` is enough), ``order_shifted`` (the same for the Taylor
            series about the middle of each row's range), ``effective_order`` (the same for the
            Chebyshev series on each row's range) and ``order_bound`` (``order_for(tolerance,
            max_score)``, the order at which every weight is within the tolerance of exp; where all
            weights of a row are small, the output needs a higher one; missing for scores above
            700). Then, of softmax's weights: ``sink_share`` (the weight of the sequence's first
            token, mean over the rows that see it and other tokens; missing if there are none),
            ``recent_share`` (the sum of the weights of the last ``RECENT_KEYS`` visible tokens, the
            row's own among them, mean over rows), ``score_range`` (the largest minus the smallest
            visible score, mean over rows) and ``effective_keys`` (exp of the mean entropy of the
            rows' weights: the number of keys, if all had the same weight). Beside a learned sink
            the weights of a row add up to less than 1; for the entropy they are divided by their
            sum.
        powers: one row per layer, head and power n, with the columns ``layer``, ``head``,
            ``power``, ``term`` (mean of |s|^n / n! over visible pairs; here and in shares, a pair
            counts as much as its decay leaves of it), ``share`` (``term`` divided by the mean of
            exp(|s|); the few largest scores dominate it), ``log10_share``, ``pair_share`` (mean
            over pairs of |s|^n / n! / exp(|s|): the size of a score does not matter),
            ``numerator`` (mean over rows of ||sum_s s^n/n! v_s|| / ||sum_s exp(s) v_s||) and
            ``error`` (mean over rows of the relative L2 error of Taylor attention of order n
            against softmax).
        specs: the attention of each layer.
        order: the highest power in ``powers``.
        tolerance: tolerance of the orders.
        max_order: the highest order that was tried.
        tokens: number of tokens measured, which is the number of rows per head.
    """

    heads: pd.DataFrame
    powers: pd.DataFrame
    specs: dict[int, AttentionSpec]
    order: int
    tolerance: float
    max_order: int
    tokens: int

    @property
    def note(self) -> str:
        """What the numbers mean if weights of the model are not exp; else empty."""
        others = [spec for spec in self.specs.values() if spec.series != "exp"]
        if not others:
            return ""
        kinds = sorted({f"(series={spec.series!r}, order={spec.order})" for spec in others})
        some = len(others) < len(self.specs)
        whose = f"{len(others)} of {len(self.specs)} layers" if some else "this model"
        return (
            f"The weights of {whose} are not exp {' and '.join(kinds)}: the numbers are for "
            "softmax of the same scores."
        )


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """Write ``analysis_heads.csv``, ``analysis_powers.csv`` and ``analysis.json`` (settings)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"analysis{end}" for end in ("_heads.csv", "_powers.csv", ".json")]
    write_text(paths[0], analysis.heads.to_csv(index=False))
    write_text(paths[1], analysis.powers.to_csv(index=False))
    settings = {name: getattr(analysis, name) for name in ("order", "tolerance", "max_order")}
    specs = {str(layer): spec.to_dict() for layer, spec in analysis.specs.items()}
    write_json(paths[2], {"specs": specs, **settings, "tokens": analysis.tokens})
    return paths
