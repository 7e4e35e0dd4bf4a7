"""How the recall task draws its rows: gaps, writes, filler and settings."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from softmax_rnn.data.tasks import parse_task


def weights(space: int, power: float) -> NDArray[np.float64]:
    law = np.arange(1, space + 1) ** (power - 1.0)
    return law / law.sum()


@pytest.mark.parametrize("power", [0.01, 0.5, 1, 2.5])
def test_gaps_follow_the_power_law(power: float) -> None:
    """The first pair has the first gap drawn, the second one is drawn from those left."""
    text = f"task:mqar?pairs=2&power={power}&filler=zero"
    ids, labels = parse_task(text, 24).draw(5, np.arange(20_000))
    gaps = (np.nonzero(labels != -100)[1].reshape(-1, 2) - 1 - 4) // 2
    swapped = np.take_along_axis(ids, 4 + 2 * gaps, axis=1)[:, 0] != ids[:, 0]
    gaps[swapped] = gaps[swapped][:, ::-1]
    law, counts = weights(10, power), np.zeros((10, 10))
    np.add.at(counts, (gaps[:, 0], gaps[:, 1]), 1)
    expected = np.array(
        [[law[i] * law[j] / (1 - law[i]) if i != j else 0 for j in range(10)] for i in range(10)]
    )
    off = ~np.eye(10, dtype=bool)
    assert counts[~off].sum() == 0
    assert stats.chisquare(counts[off], 20_000 * expected[off]).pvalue > 1e-3


@pytest.mark.parametrize("power", [1e-300, 1e-5, 300.0, 1e99])
def test_an_extreme_power_law_does_not_overflow(power: float) -> None:
    with np.errstate(all="raise"):
        labels = parse_task(f"task:mqar?pairs=2&power={power}", 64).draw(0, np.arange(50))[1]
    places = np.nonzero(labels != -100)[1].reshape(-1, 2)
    if power > 1:
        assert (places == [61, 63]).all()  # the last ones
    else:
        assert len(np.unique(places, axis=0)) > 20


def test_writes_come_in_random_order() -> None:
    """Each key is written equally often, with distinct values, and any write may be the last."""
    ids, _ = parse_task("task:mqar?pairs=2&writes=2", 12).draw(0, np.arange(6000))
    keys, values = ids[:, 0:8:2], ids[:, 1:8:2]
    patterns, counts = np.unique(keys == keys[:, :1], axis=0, return_counts=True)
    assert patterns.sum(axis=1).tolist() == [2, 2, 2]
    assert stats.chisquare(counts).pvalue > 1e-3
    assert all(len(set(row)) == 4 for row in values.tolist())


def test_random_filler_is_any_token_and_zero_filler_is_0() -> None:
    for filler, tokens in (("random", set(range(20))), ("zero", {0})):
        task = parse_task(f"task:mqar?pairs=4&vocab=20&filler={filler}", 40)
        ids, labels = task.draw(0, np.arange(300))
        filling = np.ones_like(ids, bool)
        filling[:, :8] = False
        filling[:, :-1] &= labels[:, 1:] == -100
        assert set(ids[filling].tolist()) == tokens


def test_settings_are_drawn_evenly_and_padded() -> None:
    task, positions = parse_task("task:mqar?settings=16x2,40x3,40x3,64x5", 70), np.arange(8000)
    counts = np.bincount(task.predicted(0, positions))
    assert counts[[0, 1, 4]].tolist() == [0, 0, 0]
    assert stats.chisquare(counts[[2, 3, 5]], [2000, 4000, 2000]).pvalue > 1e-3
    ids, labels = task.draw(0, positions)
    for pairs, length in ((2, 16), (3, 40), (5, 64)):
        mine = task.predicted(0, positions) == pairs
        assert (ids[mine, length:] == 0).all()
        assert (labels[mine, length:] == -100).all()
        assert (labels[mine, length - 1] != -100).any()
