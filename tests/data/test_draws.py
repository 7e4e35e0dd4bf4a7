"""Random draws that need no state."""

from __future__ import annotations

import numpy as np
import pytest

from softmax_rnn.data.draws import held_out, scattered


def test_the_smallest_share_is_one_of_a_million() -> None:
    assert held_out(123, 1e-9, np.arange(2_000_000)).sum() == 2


@pytest.mark.parametrize("fraction", [0.5, 0.1, 0.015, 0.001])
def test_the_documents_held_out_are_an_exact_share(fraction: float) -> None:
    chosen = held_out(7, fraction, np.arange(20_000))
    assert chosen.sum() == 20_000 * fraction
    assert chosen[:20].any()  # however short the corpus, it has a test split
    assert (held_out(8, fraction, np.arange(20_000)) != chosen).any()
    assert held_out(7, fraction, np.array([777]))[0] == chosen[777]  # asked for alone


def test_an_order_that_is_never_stored_is_a_permutation() -> None:
    for count in (1, 2, 37, 1000):
        order = [scattered(3, 0, place, count) for place in range(count)]
        assert sorted(order) == list(range(count))
    assert order != sorted(order)
    assert order != [scattered(3, 1, place, count) for place in range(count)]
    assert order != [scattered(4, 0, place, count) for place in range(count)]
