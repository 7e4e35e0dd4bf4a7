"""The cost model: what it promises of chunk lengths and crossovers; benchmarks check the times."""

from __future__ import annotations

import pytest
import torch

import softmax_rnn as sr
from softmax_rnn.ops.cost import Sizes, chunk_length, chunked_cost, cost_of_pairs
from softmax_rnn.ops.dispatch import FORMS, choose
from softmax_rnn.ops.forms.native_library import VARIABLE
from softmax_rnn.ops.variants import resolve


def blocked_cost(sizes: Sizes) -> float:
    return cost_of_pairs(sizes, "torch")


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [8, 16, 64])
def test_chunked_wins_from_the_crossover_on(width: int, order: int) -> None:
    spec = sr.variant("taylor", order=order)
    length = sr.crossover(spec, width, width)
    lengths = (length - 1, length, 2 * length, 1000 * length)
    every = [Sizes(spec, t, t, width, width) for t in lengths]
    costs = [(blocked_cost(sizes), chunked_cost(sizes)) for sizes in every]
    assert [chunked <= blocked for blocked, chunked in costs] == [False, True, True, True]


def test_chunked_is_linear_and_blocked_quadratic() -> None:
    spec = sr.variant("taylor", order=2)
    short, long = (Sizes(spec, t, t, 16, 16) for t in (2**16, 2**17))
    assert chunked_cost(long) / chunked_cost(short) == pytest.approx(2, rel=0.01)
    assert blocked_cost(long) / blocked_cost(short) == pytest.approx(4, rel=0.01)


def test_a_window_makes_blocked_linear() -> None:
    spec = sr.AttentionSpec(series="taylor", order=2, window=256, global_keys=4)
    costs = [blocked_cost(Sizes(spec, t, t, 16, 16)) for t in (2**13, 2**14)]
    assert costs[1] / costs[0] == pytest.approx(2, rel=0.01)
    plain = sr.variant("taylor", order=2)
    assert costs[1] < 0.1 * blocked_cost(Sizes(plain, 2**14, 2**14, 16, 16))


def test_the_chunk_is_the_cheapest_one() -> None:
    spec = sr.variant("taylor", order=2)
    sizes = Sizes(spec, 4096, 4096, 64, 64)
    best = chunk_length(sizes)
    costs = {chunk: chunked_cost(sizes, chunk=chunk) for chunk in (64, 128, 256, 512)}
    assert min(costs, key=costs.get) == best
    assert chunked_cost(sizes) == costs[best]


def test_auto_follows_the_cost_and_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")

    def chosen(length: int, mask: torch.Tensor | None = None, name: str = "taylor:2") -> str:
        x = torch.zeros(1, 8, length, 16)
        form = choose("auto", resolve(name), x, x, x, causal=True, mask=mask, stateful=False)
        return next(key for key, value in FORMS.items() if value is form)

    crossover = sr.crossover("taylor:2", 16, 16)
    assert chosen(crossover - 1) == "blocked"
    assert chosen(crossover) == "chunked"
    assert chosen(crossover, torch.ones(1, 1, 1, crossover, dtype=torch.bool)) == "chunked"
    whole = torch.ones(1, 1, crossover, crossover, dtype=torch.bool)
    assert chosen(crossover, whole) == "blocked"
    assert chosen(crossover, name="softmax") == "fused"


def test_exp_has_no_crossover() -> None:
    with pytest.raises(ValueError, match="no finite state"):
        sr.crossover("softmax", 64, 64)
