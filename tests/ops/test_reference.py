"""The paper's equations agree with one another."""

from __future__ import annotations

import math

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
