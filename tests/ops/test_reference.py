"""The paper's equations agree with one another, and with ``attention`` of the matching variant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import MASKS, WIDENED, Shape, assert_close, make_case
from softmax_rnn.ops import reference

T, D, E = 9, 3, 4
SCALE = 1 / math.sqrt(D)


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((T, D), (T, D), (T, E), (T,))
    q, k, v, gate = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in sizes)
    return q, k, v, gate.sigmoid()


Q, K, V, GATE = draw()


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


def elu1(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


def relu(x: Tensor) -> Tensor:
    return x.relu()


def plain(**fields: Any) -> sr.AttentionSpec:
    return sr.AttentionSpec(scale=1.0, denominator="none", **fields)


CASES: dict[str, tuple[sr.AttentionSpec | str, Tensor]] = {
    "equation 1": ("softmax", reference.softmax_attention(SCALE * Q, K, V)),
    "equation 2, elu": (
        plain(series="power", order=1, feature_map="elu1"),
        reference.linear_attention(Q, K, V, elu1, elu1),
    ),
    "equation 2, relu": (
        plain(series="power", order=1, feature_map="relu"),
        reference.linear_attention(Q, K, V, relu, relu),
    ),
    "equation 3": (plain(series="power", order=1), reference.first_order_attention(Q, K, V)),
    "equation 5": ("gate", reference.gate_attention(SCALE * Q, K, V, GATE, clamp=5.0)),
    "equation 6": ("norm", reference.norm_attention(SCALE * Q, K, V)),
    "appendix B": ("quadratic", reference.power_rnn(SCALE * Q, K, V, 2)),
    "section 3.1, order 2": ("taylor:2", reference.recurrent_softmax(SCALE * Q, K, V, 2)),
    "section 3.1, order 4": ("taylor:4", reference.recurrent_softmax(SCALE * Q, K, V, 4)),
    "section 3.1, numerator": (
        plain(series="taylor", order=3),
        reference.exp_sum_by_rnns(Q, K, V, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_general_formula_and_every_form_give_the_equation(name: str) -> None:
    given, expected = CASES[name]
    spec = sr.variant(given) if isinstance(given, str) else given
    options = {"output_gate": GATE} if spec.output_gate != "none" else {}
    heads = {key: x[None, None] for key, x in options.items()}
    found = reference.attention(*(x[None, None] for x in (Q, K, V)), spec, **heads)
    torch.testing.assert_close(found[0, 0], expected)
    for form in sr.forms(spec):
        out = sr.attention(*(x[None, None] for x in (Q, K, V)), spec, form=form, **heads)
        torch.testing.assert_close(out[0, 0], expected, msg=lambda text, form=form: form + text)


@pytest.mark.parametrize("name", WIDENED)
def test_dense_is_the_general_formula(name: str) -> None:
    """Decays, polynomials, windows and sinks, with the gradient of every argument."""
    shape = Shape(1, heads=2, kv_heads=1, queries=11, keys=13, width=3, value_width=2)
    for mask in MASKS:
        # Where each row or head sees other keys, all weights of a row may underflow.
        for decay in (0.1, 100.0)[: 1 if mask in ("heads", "full") else 2]:
            case = make_case(WIDENED[name], mask=mask, shape=shape, decay=decay)
            found = case.run(sr.attention, form="dense")
            assert_close(found, case.run(reference.attention), 1e-10, mask)


@pytest.mark.parametrize("position", ["before_norm", "after_norm"])
def test_a_gate_per_channel(position: Any) -> None:
    spec = sr.AttentionSpec(output_gate=position, norm="rms")
    shape = Shape(heads=2, kv_heads=1, queries=5, keys=7, width=3, value_width=2)
    case = make_case(spec, shape=shape, gate_per_channel=True)
    expected = case.run(reference.attention)
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)
