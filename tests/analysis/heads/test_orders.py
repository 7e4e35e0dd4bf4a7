"""Row shifts, and the series beside Taylor's about 0, on random layers."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from head_loops import ORDERS, by_loops
from softmax_rnn.analysis.heads.inputs import HeadInputs
from softmax_rnn.analysis.heads.orders import Rows, Terms, add_errors, chebyshev, summed, taylor
from softmax_rnn.analysis.heads.terms import LayerTerms

HIDDEN = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SHOWN = torch.ones(1, 24, dtype=torch.bool)


def layer_of(attention: str, shift: float) -> sr.Attention:
    """A random layer, whose key bias adds about ``shift`` to all scores of a row."""
    torch.manual_seed(0)
    layer = sr.Attention(32, 4, attention, num_kv_heads=2, bias=True).double()
    with torch.no_grad():
        layer.q_proj.weight *= 1.5
        layer.k_proj.weight *= 2
        layer.q_proj.bias.fill_(2.0)
        layer.k_proj.bias.fill_(shift / 2 / math.sqrt(8))
    return layer


def found_in(layer: sr.Attention, tolerance: float = 0.03) -> dict[str, list[int]]:
    """The orders of each head."""
    with torch.no_grad():
        inputs = HeadInputs.of(layer.spec, layer.project(HIDDEN), SHOWN[0])
    terms = LayerTerms(0, inputs.q, 5, 128, most_pairs=300)
    terms.add(inputs)
    return terms.frames(24, tolerance)[0][["max_radius", *ORDERS]].to_dict("list")


@pytest.mark.parametrize("attention", ["softmax", "softmax+decay", "window:6"])
def test_orders_of_random_layers(attention: str) -> None:
    layer = layer_of(attention, 0.5)
    found = found_in(layer)
    with torch.no_grad():
        given = layer.project(HIDDEN)
    for head in range(4):
        expected = by_loops((*given[:3], given.log_decay), layer.spec, head, SHOWN)
        for name in ("max_radius", *ORDERS):
            assert found[name][head] == pytest.approx(expected[name], rel=1e-9), name
    assert min(found["effective_order"]) > 1


@pytest.mark.parametrize("attention", ["softmax", "softmax+decay", "window:6"])
def test_a_shift_of_each_row_changes_taylor_about_0_alone(attention: str) -> None:
    before, after = (found_in(layer_of(attention, shift)) for shift in (0.0, 20.0))
    for name in ("max_radius", "order_shifted", "effective_order"):
        assert before[name] == pytest.approx(after[name], rel=1e-9), name
    for low, high in zip(before["order_needed"], after["order_needed"], strict=True):
        assert high > low + 10
    for far, effective in zip(after["order_needed"], after["effective_order"], strict=True):
        assert effective < far / 2


def test_a_shift_of_each_row_needs_no_larger_state() -> None:
    """The shifted sums, read from the states of the powers of the score up to the order."""
    order = 3
    q, k, v = torch.randn(3, 1, 2, 10, 4, dtype=torch.float64).unbind(0)
    scores = q @ k.mT / 2
    shift = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf).amax(-1)
    expected = sum((scores - shift[..., None]) ** n / math.factorial(n) for n in range(order + 1))
    powers = [
        sr.AttentionSpec(series="power", order=n, denominator="none") for n in range(order + 1)
    ]
    states = [sr.attention(q, k, v, spec, form="recurrent") for spec in powers]
    read = torch.zeros_like(v)
    for n in range(order + 1):
        for m in range(n + 1):
            factor = math.comb(n, m) * (-shift) ** (n - m) / math.factorial(n)
            read += factor[..., None] * states[m]
    torch.testing.assert_close(read, expected.tril() @ v)


def rows(radius: float) -> Rows:
    """Two heads, three rows of scores with this radius, about different middles."""
    t = torch.linspace(-1, 1, 9, dtype=torch.float64).expand(2, 3, 9)
    middle = torch.tensor([-30.0, 0.5, 80.0], dtype=torch.float64)[:, None]
    factor = torch.linspace(0.1, 1, 9, dtype=torch.float64).expand(2, 3, 9).clone()
    v = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v[..., -1] = 1
    return Rows(radius * t + middle, factor, v, v[..., :-1].abs().amax((1, 2)))


def total(terms: Terms, count: int) -> Tensor:
    return sum(coefficient[..., None] * basis for coefficient, basis in islice(terms, count))


@pytest.mark.parametrize("radius", [0.0, 1e-9, 3.0, 40.0, 300.0, 3000.0])
def test_the_series_add_up_to_exp(radius: float) -> None:
    """Taylor's terms alternate in sign, so that its rounding error is that of the largest term."""
    given = rows(radius)
    center, half = given.range()
    torch.testing.assert_close(half, torch.full_like(half, radius))
    expected = (given.scores - center[..., None] - half[..., None]).exp() * given.factor
    torch.testing.assert_close(total(chebyshev(given, center, half), 700), expected)
    if radius <= 300:
        torch.testing.assert_close(
            total(taylor(given, center, half), 1200), expected, rtol=1e-7, atol=1e-12
        )


@pytest.mark.parametrize("radius", [3.0, 40.0, 300.0])
def test_chebyshev_needs_the_lowest_order(radius: float) -> None:
    """About the square root of the radius, where Taylor's order grows with the radius itself."""
    given, lowest = rows(radius), []
    center, half = given.range()
    for series in (chebyshev, taylor):
        errors = torch.zeros(2, 1000, dtype=torch.float64)
        sums = summed(series(given, center, half), given)
        add_errors(errors, given, sums, center + half)
        assert torch.isfinite(errors).all()
        lowest.append(int(np.argmax((errors.amax(0) / 3 <= 1e-3).numpy())))
    assert 0 < lowest[0] < lowest[1]
    if radius > 3:
        assert lowest[0] < 5 * math.sqrt(radius) < radius < lowest[1]


def test_keys_that_a_query_does_not_see_count_nowhere() -> None:
    given = rows(3.0)
    hidden = given.factor.clone()
    hidden[..., [0, 5]] = 0
    changed = given.scores.clone()
    changed[..., [0, 5]] = 1e6
    found = []
    for scores in (given.scores, changed):
        here = given._replace(scores=scores, factor=hidden)
        errors = torch.zeros(2, 20, dtype=torch.float64)
        center, half = here.range()
        sums = summed(chebyshev(here, center, half), here)
        add_errors(errors, here, sums, center + half)
        found.append(errors)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_row_sum_that_crosses_zero_is_kept_from_it() -> None:
    """The output is then a million times the largest value, as in the operation."""
    given = rows(3.0)
    sums = torch.tensor([0.0, 3.0, 0.0, -1.0, -1e-12], dtype=torch.float64).expand(2, 3, 5)
    unit, errors = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    add_errors(errors, given, iter([(unit + 1, sums)]), unit)
    exact, _ = given.exact()
    softmax = exact[..., :-1] / exact[..., -1:]
    out = -1e6 / 3 * given.largest[:, None, None] * sums[..., :-1]
    expected = (out - softmax).norm(dim=-1) / softmax.norm(dim=-1)
    torch.testing.assert_close(errors[:, 0], expected.sum(1))
