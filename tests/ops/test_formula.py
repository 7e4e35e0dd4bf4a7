"""The whole formula gives the paper's equations, and every form gives the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import MASKS, WIDENED, Shape, assert_close, make_case
from softmax_rnn.ops import formula, reference

T, D, E = 9, 3, 4
SCALE = 1 / math.sqrt(D)


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((T, D), (T, D), (T, E), (T,))
    q, k, v, gate = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in sizes)
    return q, k, v, gate.sigmoid()


Q, K, V, GATE = draw()


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
    "section 3.1, numerator in chunks": (
        plain(series="taylor", order=2),
        reference.exp_sum_by_chunks(Q, K, V, 2, chunk=4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_general_formula_and_every_form_give_the_equation(name: str) -> None:
    given, expected = CASES[name]
    spec = sr.variant(given) if isinstance(given, str) else given
    options = {"output_gate": GATE} if spec.output_gate != "none" else {}
    heads = {key: x[None, None] for key, x in options.items()}
    found = formula.attention(*(x[None, None] for x in (Q, K, V)), spec, **heads)
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
            assert_close(found, case.run(formula.attention), 1e-10, mask)


@pytest.mark.parametrize("position", ["before_norm", "after_norm"])
def test_a_gate_per_channel(position: Any) -> None:
    spec = sr.AttentionSpec(output_gate=position, norm="rms")
    shape = Shape(heads=2, kv_heads=1, queries=5, keys=7, width=3, value_width=2)
    case = make_case(spec, shape=shape, gate_per_channel=True)
    expected = case.run(formula.attention)
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)
