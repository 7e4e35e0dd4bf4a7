"""The sentence above a table of results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from softmax_rnn.report.table import conclusion


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        (
            {"norm": (-0.02, -0.03, -0.01), "gate": (0.3, 0.2, 0.4)},
            "norm is better than softmax by 0.0200 nats per token (95% interval: 0.0100 to 0.0300, "
            "over seeds and test blocks); gate is worse than softmax by 0.3000 nats per token (95% "
            "interval: 0.2000 to 0.4000, over seeds and test blocks).",
        ),
        (
            {"a": (0.5, 0.4, 0.6), "b": (0.3, 0.2, 0.4), "c": (0.01, -0.1, 0.12)},
            "b is worse than softmax by 0.3000 nats per token (95% interval: 0.2000 to 0.4000, "
            "over seeds and test blocks), and a by more; c cannot be told from softmax, since its "
            "interval includes 0.",
        ),
        (
            dict.fromkeys(("a", "b"), (0.01, -0.1, 0.12)),
            "a and b cannot be told from softmax, since their intervals include 0.",
        ),
        (
            dict.fromkeys(("a", "b", "c", "d"), (-0.1, -0.2, 0.0)),
            "4 variants cannot be told from softmax, since their intervals include 0.",
        ),
        (
            {"a": (0.2, 0.1, 0.3, "test blocks only"), "b": (-0.1, -np.inf, np.inf, "")},
            "b cannot be told from softmax, since its interval includes 0; one seed decides "
            "nothing about a.",
        ),
        (
            {"a": (0.2, 0.1, 0.3, "test blocks only"), "b": (0.3, 0.2, 0.4, "test blocks only")},
            "One seed decides nothing: in it softmax has the lowest test loss, 0.2000 nats per "
            "token below that of a.",
        ),
        (
            {"a": (-0.2, -0.3, -0.1, "test blocks only")},
            "One seed decides nothing: in it a has the lowest test loss, 0.2000 nats per token "
            "below that of softmax.",
        ),
        ({}, "No variant shares a seed with softmax: no difference can be judged."),
    ],
)
def test_a_sentence_says_who_is_better_and_how_surely(
    differences: dict[str, tuple[Any, ...]], words: str
) -> None:
    rows: list[tuple[Any, ...]] = [("softmax", np.nan, np.nan, np.nan, "")]
    rows += [(name, *row, "seeds and test blocks")[:5] for name, row in differences.items()]
    names = ["variant", "difference", "low", "high", "interval_over"]
    assert conclusion(pd.DataFrame(rows, columns=names)) == words
