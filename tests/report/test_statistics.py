"""The coverage of confidence intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from softmax_rnn.report.statistics import half_width, mean_squares, paired_difference


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


# The variance of the seeds' part of a mean over that of the blocks' and the rest's together. It is
# the ratio of single effects times blocks / seeds.
RATIOS = (0, 0.01, 0.1, 0.3, 1, 3, 10, 100, math.inf)
REST = (0, 0.1, 0.5, 1)  # the share of the rest in the latter two


@pytest.mark.parametrize("confidence", [0.95, 0.9])
@pytest.mark.parametrize("seeds", range(2, 11))
def test_coverage_of_normal_effects(seeds: int, confidence: float) -> None:
    """The interval covers the true mean as often as it says, whatever varies, and hardly more.

    The mean squares of normal effects are chi-squares that do not depend on the mean. A test of
    equality at 5% is a 90% interval.
    """
    draw, draws = np.random.default_rng(seeds), 8000
    found, widest = [], 0.0
    for blocks in (8, 16, 60, 200):
        freedom = np.array([seeds - 1, blocks - 1, (seeds - 1) * (blocks - 1)])
        chi = draw.chisquare(freedom, (draws, 3)) / freedom
        for ratio, rest in itertools.product(RATIOS, REST):
            seed, others = (1.0, 0.0) if ratio == math.inf else (ratio, 1.0)
            expected = np.array([seed + rest * others, others, rest * others]) * seeds * blocks
            half = half_width((chi * expected).T, seeds, blocks, confidence)
            covered = 2 * stats.norm.cdf(half / math.sqrt(seed + others)) - 1
            error = 4 * covered.std() / math.sqrt(draws)
            found.append((covered.mean() + error, blocks, ratio, rest))
            if seeds > 2 and blocks > 8:
                widest = max(widest, covered.mean() - error)
    assert min(found)[0] >= confidence - 0.01, min(found)
    assert max(found)[0] <= (0.985 if confidence == 0.95 else 0.955), max(found)
    assert widest <= (0.97 if confidence == 0.95 else 0.935)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("ratio", [0, 0.3, 3, 100])
def test_coverage_of_skewed_blocks(seeds: int, ratio: float) -> None:
    """The same from the losses themselves; blocks have a skewness of 1."""
    draw, draws, blocks = np.random.default_rng(1), 4000, 30
    of_seeds = draw.normal(0, math.sqrt(ratio * seeds), (draws, seeds, 1))
    of_blocks = (draw.gamma(4, size=(draws, 1, blocks)) / 2 - 2) * math.sqrt(blocks)
    losses = of_seeds + of_blocks + draw.normal(0, 0.1, (draws, seeds, blocks))
    half = half_width(mean_squares(losses), seeds, blocks)
    covered = (np.abs(losses.mean((1, 2))) <= half).mean()
    error = 4 * math.sqrt(0.05 * 0.95 / draws)
    assert 0.94 - error <= covered <= 0.975 + error
    one = paired_difference(losses[0] + 7.0, np.full((seeds, blocks), 7.0))
    assert (one.high - one.low) / 2 == pytest.approx(half[0])


def test_the_interval_of_known_mean_squares() -> None:
    """Seeds alone, and blocks alone, are paired t intervals; a common rest counts once."""
    for squares, freedom in (((6.0, 0.0, 0.0), 2), ((0.0, 6.0, 0.0), 19), ((6.0, 6.0, 6.0), 2)):
        half = half_width(tuple(map(np.asarray, squares)), 3, 20)
        expected = stats.t.ppf(0.975, freedom) * math.sqrt(6 / 60)
        # The t quantile of the rest differs a little from that of the blocks.
        assert half == pytest.approx(expected, rel=0.02 if squares[2] else 1e-9)


def test_seeds_that_agree_by_chance_do_not_give_an_interval_of_nothing() -> None:
    half = half_width(tuple(map(np.asarray, (0.0, 6.0, 6.0))), 3, 20)
    assert half >= stats.t.ppf(0.975, 19) * math.sqrt(6 / 60) / 2


def test_mean_squares_are_those_of_an_analysis_of_variance() -> None:
    losses = np.array([[1.0, 2.0, 6.0], [3.0, 4.0, 2.0]])
    # The means: 3 of each seed; 2, 3, 4 of the blocks.
    assert mean_squares(losses) == pytest.approx((0.0, 2.0, 6.0))


def test_edges() -> None:
    same = np.ones((2, 5))
    assert paired_difference(same, same).high == 0.0
    alone = paired_difference(np.ones((1, 1)), np.zeros((1, 1)))
    assert (alone.mean, alone.low, str(alone)) == (1.0, -np.inf, "+1.0000")
    seeds_alone = paired_difference(np.array([[1.0], [2.0], [4.0]]), np.zeros((3, 1)))
    expected = stats.ttest_1samp([1.0, 2.0, 4.0], 0).confidence_interval(0.95)
    assert (seeds_alone.low, seeds_alone.high) == pytest.approx((expected.low, expected.high))
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference(np.ones((1, 4)), np.ones((1, 5)))
