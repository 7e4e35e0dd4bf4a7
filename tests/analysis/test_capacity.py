"""Capacity: ranks against matrices of weights, estimates against sums over drawn keys."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import softmax_rnn as sr
from softmax_rnn.analysis import capacity
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.monomials import dimension, state_rows
from softmax_rnn.report.memory import layer_memory
from softmax_rnn.training.config import RunConfig

F64 = torch.float64


def weights(spec: sr.AttentionSpec, keys: torch.Tensor) -> np.ndarray:
    """The matrix of f(k_i . k_j), from attention itself: unit vectors as values, no denominator."""
    raw = sr.AttentionSpec(spec.feature_map, spec.series, spec.order, scale=1.0, denominator="none")
    count = len(keys)
    identity = torch.eye(count, dtype=F64)
    out = sr.attention(
        keys[None, None], keys[None, None], identity[None, None], raw, form="dense", causal=False
    )
    return out[0, 0].numpy()


def rank(matrix: np.ndarray) -> int:
    scale = 1 / np.sqrt(np.diag(matrix))
    return int(np.linalg.matrix_rank(matrix * scale * scale[:, None], tol=1e-10))


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_monomials_are_the_multisets_of_channels(order: int, width: int) -> None:
    sizes = [len(list(combinations_with_replacement(range(width), n))) for n in range(order + 1)]
    assert capacity.largest_rank(f"power:{order}", width) == sizes[-1]
    assert capacity.largest_rank(f"taylor:{order}", width) == sum(sizes)
    assert capacity.largest_rank(f"taylor:{order}", width) == math.comb(width + order, order)


def test_bytes_of_a_layer() -> None:
    config = RunConfig.preset("demo", attention="taylor:2")
    heads, width = 4, 32
    rows = capacity.largest_rank("taylor:2", width)
    assert sr.state_size("taylor:2", width, width) == rows * (width + 1)
    assert layer_memory(config).size == 4 * heads * rows * (width + 1)


@pytest.mark.parametrize("feature_map", ["identity", "elu1", "cosine"])
@pytest.mark.parametrize(
    ("series", "order"), [("power", 1), ("power", 2), ("taylor", 2), ("power", 3)]
)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_random_keys_reach_the_largest_rank(
    feature_map: str, series: str, order: int, width: int
) -> None:
    spec = sr.AttentionSpec(feature_map, series, order)
    largest = capacity.largest_rank(spec, width)
    keys = torch.randn(2 * largest + 5, width, dtype=F64, generator=torch.manual_seed(0))
    for count in (1, largest // 2, largest, largest + 1, len(keys)):
        assert rank(weights(spec, keys[:count])) == min(count, largest)
    if feature_map != "cosine":
        assert largest == state_rows(spec, width)


def test_keys_of_one_length_have_fewer_independent_monomials() -> None:
    spec = sr.AttentionSpec("cosine", "taylor", 3)
    assert capacity.largest_rank(spec, 4) == dimension(4, 3) + dimension(4, 2) == 30
    assert state_rows(spec, 4) == 35
    gap = sr.AttentionSpec("cosine", "polynomial", coefficients=(1.0, 0.0, 0.5))
    assert capacity.largest_rank(gap, 4) == dimension(4, 2)


def test_relu_needs_more_keys_for_the_same_rank() -> None:
    """A zero channel removes monomials of one key, but none of all keys."""
    spec, draw = sr.AttentionSpec("relu", "power", 3), torch.manual_seed(0)
    keys = torch.randn(400, 3, dtype=F64, generator=draw)
    keys = keys[(keys > 0).any(-1)]
    largest = capacity.largest_rank(spec, 3)
    assert rank(weights(spec, keys[:largest])) < largest == rank(weights(spec, keys))


def test_exp_has_full_rank_for_any_number_of_keys() -> None:
    angle = torch.arange(24, dtype=F64) * (2 * math.pi / 24)
    keys = 4 * torch.stack([angle.cos(), angle.sin()], -1)
    assert rank(weights(sr.AttentionSpec(), keys)) == 24
    assert rank(weights(sr.AttentionSpec(series="taylor", order=4), keys)) == 9


@pytest.mark.parametrize("count", [9, 10])
def test_beyond_the_rank_some_values_are_lost_in_the_state(count: int) -> None:
    """With M = 9 and ten keys, two sets of values have the same state."""
    keys = torch.randn(count, 8, dtype=F64, generator=torch.manual_seed(0))
    spec = sr.AttentionSpec(series="taylor", order=1, scale=1.0, denominator="none")
    v = torch.from_numpy(np.linalg.svd(weights(spec, keys))[2][-1])[:, None]
    queries = torch.randn(50, 8, dtype=F64)
    found = sr.attention(queries[None, None], keys[None, None], v[None, None], spec, causal=False)
    assert (found.abs().max() < 1e-10) == (count > 9)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_effective_features_of_a_power(order: int) -> None:
    for width in (2, 3, 8, 64):
        expected = math.prod((width + 2 * i) / (2 * i + 1) for i in range(order))
        assert capacity.effective_features(f"power:{order}", width, 7.0) == pytest.approx(expected)


def test_effective_features_against_random_directions() -> None:
    keys = F.normalize(
        torch.randn(2, 200_000, 5, dtype=F64, generator=torch.manual_seed(0)), dim=-1
    )
    cosines = (keys[0] * keys[1]).sum(-1)
    for name, f in (("taylor:2", lambda x: 1 + x + x**2 / 2), ("softmax", torch.exp)):
        expected = float(f(torch.tensor(3.0)) ** 2 / (f(3 * cosines) ** 2).mean())
        assert capacity.effective_features(name, 5, 3.0) == pytest.approx(expected, rel=0.02)


def test_no_polynomial_has_more_effective_features_than_rank() -> None:
    """The reproducing kernel of the polynomials on the sphere reaches it."""
    best = sr.AttentionSpec(series="polynomial", coefficients=(1 - 2.5, 3.0, 7.5))
    sphere = capacity.largest_rank(sr.AttentionSpec("cosine", "taylor", 2), 3)
    assert capacity.effective_features(best, 3) == pytest.approx(sphere) == pytest.approx(9)
    for score in (0.1, 1, 3, 10, 100):
        assert capacity.effective_features("taylor:2", 3, score) < 9


@pytest.mark.parametrize("width", [16, 64])
def test_maps_to_positive_channels_bound_the_effective_features(width: int) -> None:
    """Random keys: pi^2 for relu and 2.13 for elu + 1, whatever the width."""
    q, k = torch.randn(2, 100_000, width, dtype=F64, generator=torch.manual_seed(0))
    for name, bound in (("relu", math.pi**2), ("elu1", 2.13)):
        q_map, k_map = FEATURE_MAPS[name](q), FEATURE_MAPS[name](k)
        own, other = (q_map**2).sum(-1).mean() ** 2, ((q_map * k_map).sum(-1) ** 2).mean()
        assert 0.5 * bound < float(own / other) < bound


def test_accuracy_against_a_direct_draw() -> None:
    draw = np.random.default_rng(0)
    sums = draw.standard_normal((200_000, 5))
    sums[:, 0] += math.sqrt(6 * 5 / 10)
    expected = (sums.argmax(-1) == 0).mean()
    assert capacity.recall_accuracy(10, 6.0, 5) == pytest.approx(expected, abs=0.005)


def test_capacity_inverts_the_accuracy() -> None:
    for accuracy in (0.2, 0.5, 0.99):
        pairs = capacity.capacity(27.0, 16, accuracy)
        assert capacity.recall_accuracy(pairs, 27.0, 16) == pytest.approx(accuracy, abs=1e-6)
    # M_eff V / (2 ln V), up to terms of lower order.
    assert capacity.capacity(1.0, 10**6) == pytest.approx(10**6 / (2 * math.log(10**6)), rel=0.2)


def test_random_recall_is_attention_and_argmax() -> None:
    width, pairs, values, rows = 3, 7, 4, 5
    found = capacity.random_recall("power:2", width, pairs, values, rows=rows, seed=3)
    draw = torch.Generator().manual_seed(3)
    keys = torch.randn(rows, pairs, width, generator=draw, dtype=F64)
    answers = torch.randint(values, (rows, pairs), generator=draw)
    right = 0
    for row in range(rows):
        for i in range(pairs):
            sums = [0.0] * values
            for j in range(pairs):
                cosine = torch.cosine_similarity(keys[row, i], keys[row, j], dim=0)
                sums[answers[row, j]] += float(cosine) ** 2
            right += int(np.argmax(sums)) == int(answers[row, i])
    assert found == pytest.approx(right / (rows * pairs))


def test_random_recall_agrees_with_the_estimate() -> None:
    useful = capacity.effective_features("power:1", 32)
    measured = capacity.random_recall("power:1", 32, 121, 16)
    assert measured == pytest.approx(capacity.recall_accuracy(120, useful, 16), abs=0.03)


def test_learned_keys_hold_more_than_random_keys() -> None:
    learned = capacity.learned_recall("power:2", 3, 12, 4, steps=150)
    assert learned > capacity.random_recall("power:2", 3, 12, 4, rows=200) + 0.05


def test_learned_recall_with_more_channels_than_pairs_is_complete() -> None:
    assert capacity.learned_recall("power:1", 8, 4, 4, steps=100) == 1.0
    options = {"keys": 6, "value_width": 6, "distinct": True}
    assert capacity.learned_recall("taylor:2", 6, 3, 5, steps=200, **options) > 0.95


def test_rotary_positions_tell_tokens_apart_by_their_frequencies() -> None:
    """The score of one frequency, cos(t), is nearly the same at 0 and 44 = 7 * 2 pi."""
    found = {
        width: capacity.learned_recall("power:1", width, 16, 16, spacing=2, steps=150)
        for width in (2, 32)
    }
    assert found[2] < 0.85 < 0.95 < found[32]


def test_rotation_is_that_of_the_layer() -> None:
    from transformers.models.llama.modeling_llama import rotate_half

    x, places = torch.randn(1, 6), torch.arange(5)
    angles = torch.outer(places.float(), 10_000.0 ** (-torch.arange(0, 6, 2) / 6)).repeat(1, 2)
    expected = x * angles.cos() + rotate_half(x) * angles.sin()
    torch.testing.assert_close(capacity._rotated(x, places), expected)


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match="infinitely many powers"):
        capacity.largest_rank("softmax", 4)
    with pytest.raises(ValueError, match="feature_map='relu'"):
        capacity.effective_features("linear_relu", 4)
    with pytest.raises(ValueError, match="width must be at least 2, not 1"):
        capacity.effective_features("power:1", 1)
    with pytest.raises(ValueError, match=r"above chance, 0\.25"):
        capacity.capacity(8.0, 4, 0.2)
