"""The paper's equations agree with one another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from softmax_rnn.ops import reference

T, D, E = 9, 3, 4


def draw(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*n, generator=generator, dtype=torch.float64) for n in shapes)


Q, K, V = draw((T, D), (T, D), (T, E))


@pytest.mark.parametrize("n", range(5))
def test_a_power_of_the_score_is_one_rnn(n: int) -> None:
    torch.testing.assert_close(reference.power_rnn(Q, K, V, n), ((Q @ K.T) ** n).tril() @ V)
    torch.testing.assert_close(
        reference.kronecker_power(Q, n) @ reference.kronecker_power(K, n).T, (Q @ K.T) ** n
    )


def test_equation_3_is_equation_2_and_the_second_term_of_section_3_1() -> None:
    first = reference.first_order_attention(Q, K, V)
    torch.testing.assert_close(first, reference.linear_attention(Q, K, V))
    lower, upper = (reference.exp_sum_by_rnns(Q, K, V, n) for n in (0, 1))
    torch.testing.assert_close(first, upper - lower)


def test_the_rnns_sum_to_softmax() -> None:
    exact = reference.softmax_attention(Q, K, V)
    errors = [
        float((reference.recurrent_softmax(Q, K, V, n) - exact).abs().max()) for n in (2, 4, 6, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    # Exactly, with the powers of the scores in place of states of d^n numbers: order 40.
    weights = sum((Q @ K.T) ** n / float(math.factorial(n)) for n in range(41)).tril()
    torch.testing.assert_close(weights @ V / weights.sum(-1, keepdim=True), exact)


@pytest.mark.parametrize("chunk", [1, 3, 4, T, T + 5])
@pytest.mark.parametrize("order", range(4))
def test_chunks_are_the_recurrence_and_the_quadratic_formula(order: int, chunk: int) -> None:
    found = reference.exp_sum_by_chunks(Q, K, V, order, chunk)
    torch.testing.assert_close(found, reference.exp_sum_by_rnns(Q, K, V, order))
    weights = torch.stack([(Q @ K.T) ** n / math.factorial(n) for n in range(order + 1)]).sum(0)
    torch.testing.assert_close(found, weights.tril() @ V)
    ones = torch.ones_like(V[:, :1])
    torch.testing.assert_close(
        found / reference.exp_sum_by_chunks(Q, K, ones, order, chunk),
        reference.recurrent_softmax(Q, K, V, order),
    )


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_chunks_of_any_length(tokens: int) -> None:
    q, k, v = draw((tokens, D), (tokens, D), (tokens, E))
    expected = reference.exp_sum_by_rnns(q, k, v, 2)
    for chunk in range(1, tokens + 2):
        torch.testing.assert_close(reference.exp_sum_by_chunks(q, k, v, 2, chunk), expected)


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_chunks_have_the_gradients_of_the_recurrence(chunk: int) -> None:
    given = [x.clone().requires_grad_() for x in (Q, K, V)]
    (upstream,) = draw((T, E))
    found, expected = (
        torch.autograd.grad(out, given, upstream)
        for out in (
            reference.exp_sum_by_chunks(*given, 3, chunk),
            reference.exp_sum_by_rnns(*given, 3),
        )
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("order", range(4))
def test_monomials_give_the_series_of_the_score(order: int) -> None:
    found = reference.monomials(Q, order) @ reference.monomials(K, order).T
    torch.testing.assert_close(found, reference.taylor(Q @ K.T, order))
    assert reference.monomials(Q, order).shape == (T, sum(D**n for n in range(order + 1)))


EVERY: dict[str, Callable[..., Tensor]] = {
    "softmax_attention": reference.softmax_attention,
    "linear_attention": lambda q, k, v: reference.linear_attention(q, k, v, torch.exp, torch.exp),
    "power_rnn": lambda q, k, v: reference.power_rnn(q, k, v, 2),
    "exp_sum_by_rnns": lambda q, k, v: reference.exp_sum_by_rnns(q, k, v, 2),
    "exp_sum_by_chunks": lambda q, k, v: reference.exp_sum_by_chunks(q, k, v, 2, 4),
    "recurrent_softmax": lambda q, k, v: reference.recurrent_softmax(q, k, v, 2),
    "first_order_attention": reference.first_order_attention,
    "gate_attention": lambda q, k, v: reference.gate_attention(
        q, k, v, reference.softmax_gate(q, k)
    ),
    "norm_attention": reference.norm_attention,
}


@pytest.mark.parametrize("name", EVERY)
def test_heads_and_grouped_queries(name: str) -> None:
    """Every head by itself; four query heads share two heads of keys and values."""
    B, H, HKV = 2, 4, 2
    q, k, v = draw((B, H, T, D), (B, HKV, T, D), (B, HKV, T, E))
    found = EVERY[name](q.unflatten(1, (HKV, -1)), k.unsqueeze(2), v.unsqueeze(2)).flatten(1, 2)
    k, v = (x.repeat_interleave(H // HKV, dim=1) for x in (k, v))
    torch.testing.assert_close(found, EVERY[name](q, k, v))
    for b, h in itertools.product(range(B), range(H)):
        torch.testing.assert_close(found[b, h], EVERY[name](q[b, h], k[b, h], v[b, h]))


def test_equations_4_and_5_give_softmax_back() -> None:
    """With softmax's own gate, equation 5 is softmax over t."""
    gate = reference.softmax_gate(Q, K)
    t = torch.arange(1, T + 1, dtype=torch.float64)
    found = reference.gate_attention(Q, K, V, gate * t)
    torch.testing.assert_close(found, reference.softmax_attention(Q, K, V))


def test_equation_6_is_the_direction_of_equation_1() -> None:
    found = reference.norm_attention(Q, K, V)
    exact = reference.softmax_attention(Q, K, V)
    torch.testing.assert_close(found, exact / exact.norm(dim=-1, keepdim=True))
