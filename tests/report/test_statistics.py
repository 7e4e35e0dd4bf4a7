"""The coverage of confidence intervals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from softmax_rnn.report.statistics import paired_difference


def test_one_seed_is_the_paired_t_interval() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(2.0, 1.0, (1, 50)), draw.normal(1.8, 1.0, (1, 50))
    found = paired_difference(a, b)
    expected = stats.ttest_rel(a[0], b[0]).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx((a - b).mean())
    assert (
        str(found) == f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] (test blocks only)"
    )
    assert str(paired_difference(np.tile(a, (2, 1)), np.tile(b, (2, 1)))).endswith("]")


@pytest.mark.parametrize(("seed_sd", "block_sd"), [(0.02, 0.3), (0.2, 0.1), (0.0, 0.3)])
def test_coverage(seed_sd: float, block_sd: float) -> None:
    """Over many draws of seeds and blocks the interval covers the true value in at least 94%."""
    draw, held = np.random.default_rng(1), 0
    for _ in range(600):
        seeds = draw.normal(0, seed_sd, (4, 1))
        blocks = draw.normal(0, block_sd, (1, 80))
        noise = draw.normal(0, 0.1, (4, 80))
        found = paired_difference(0.5 + seeds + blocks + noise, np.zeros((4, 80)))
        held += found.low <= 0.5 <= found.high
    assert held >= 0.94 * 600


def test_edges() -> None:
    same = np.ones((2, 5))
    assert paired_difference(same, same).high == 0.0
    alone = paired_difference(np.ones((1, 1)), np.zeros((1, 1)))
    assert (alone.mean, alone.low, str(alone)) == (1.0, -np.inf, "+1.0000")
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference(np.ones((1, 4)), np.ones((1, 5)))
