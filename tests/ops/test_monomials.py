"""The algebra of section 3.1 and appendices A, B, C, F, against explicit Kronecker powers."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops import formula
from softmax_rnn.ops.monomials import (
    cumulative_dimension,
    dimension,
    monomials,
    monomials_backward,
    multiplicities,
    row_weights,
    state_rows,
)
from softmax_rnn.ops.reference import exp_sum_by_rnns, kronecker_power, power_rnn

SMALL = {"width": st.integers(1, 5), "degree": st.integers(0, 6), "seed": st.integers(0, 999)}


def normal(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def enumerated(width: int, degree: int) -> list[tuple[int, ...]]:
    """Every monomial as its sorted indices: by degree, then largest index, then the rest alike."""
    every = (
        indices
        for order in range(degree + 1)
        for indices in combinations_with_replacement(range(width), order)
    )
    return sorted(every, key=lambda indices: (len(indices), indices[::-1]))


@pytest.mark.parametrize(("width", "degree"), [(1, 0), (1, 4), (3, 0), (3, 1), (4, 5), (6, 3)])
def test_monomials_are_all_products_in_order_with_their_multiplicities(
    width: int, degree: int
) -> None:
    x = normal(width, 3)
    expected = enumerated(width, degree)
    found = monomials(x, degree)
    assert len(expected) == len(found) == cumulative_dimension(width, degree)
    assert len(expected) == sum(dimension(width, n) for n in range(degree + 1))
    for row, indices in zip(found, expected, strict=True):
        torch.testing.assert_close(row, x[list(indices)].prod(0))
    for count, indices in zip(multiplicities(width, degree), expected, strict=True):
        repeats = math.prod(math.factorial(indices.count(i)) for i in set(indices))
        assert count == math.factorial(len(indices)) / repeats


@given(**SMALL)
def test_kronecker_powers_and_monomials_give_powers_of_the_inner_product(
    width: int, degree: int, seed: int
) -> None:
    """Equations 7 and 8 (appendix A), and the same in the symmetric basis."""
    a, b = normal(2, width, seed=seed)
    expected = (a @ b) ** degree
    torch.testing.assert_close(kronecker_power(a, degree) @ kronecker_power(b, degree), expected)
    last = slice(cumulative_dimension(width, degree) - dimension(width, degree), None)
    counts = torch.from_numpy(multiplicities(width, degree))[last]
    columns = [monomials(x.unsqueeze(-1), degree)[last, 0] for x in (a, b)]
    torch.testing.assert_close((counts * columns[0]) @ columns[1], expected)


@given(**SMALL, length=st.integers(1, 9))
def test_the_gradient_of_monomials(width: int, degree: int, seed: int, length: int) -> None:
    x = normal(2, width, length, seed=seed).requires_grad_()
    rows = enumerated(width, degree)
    slow = torch.stack([x[:, list(row)].prod(1) for row in rows], dim=1)
    upstream = normal(*slow.shape, seed=seed + 1)
    (expected,) = torch.autograd.grad(slow, x, upstream, materialize_grads=True)
    x = x.detach()
    features = monomials(x, degree)
    found = monomials_backward(x, degree, features, upstream.clone())
    torch.testing.assert_close(found, expected)


@given(
    width=st.integers(1, 4),
    order=st.integers(0, 4),
    series=st.sampled_from(["taylor", "power"]),
    feature_map=st.sampled_from(["identity", "elu1", "relu"]),
    form=st.sampled_from(["dense", "blocked", "chunked", "recurrent"]),
    seed=st.integers(0, 999),
)
def test_every_form_is_the_sum_of_the_papers_rnns(
    width: int, order: int, series: str, feature_map: str, form: str, seed: int
) -> None:
    """Section 3.1, equations 2 and 3 (power 1), appendix B (power 2) and F (feature maps)."""
    spec = sr.AttentionSpec(
        series=series, order=order, feature_map=feature_map, denominator="none", scale=1.0
    )
    q, k, v = normal(3, 7, width, seed=seed)
    phi = {"identity": lambda x: x, "elu1": lambda x: torch.nn.functional.elu(x) + 1}.get(
        feature_map, torch.relu
    )
    rnn = power_rnn if series == "power" else exp_sum_by_rnns
    expected = rnn(phi(q), phi(k), v, order)
    found = sr.attention(*(x[None, None] for x in (q, k, v)), spec, form=form)
    torch.testing.assert_close(found[0, 0], expected)


def test_bidirectional_is_one_state_for_all_queries() -> None:
    """Appendix C: the sum runs to N, so that every query reads the same hidden state."""
    q, k, v = normal(3, 9, 3)
    hidden = [torch.einsum("sf,se->fe", kronecker_power(k, n), v) for n in range(4)]
    expected = sum(
        kronecker_power(q, n) @ state / math.factorial(n) for n, state in enumerate(hidden)
    )
    spec = sr.AttentionSpec(series="taylor", order=3, denominator="none", scale=1.0)
    for form in sr.forms(spec):
        found = sr.attention(*(x[None, None] for x in (q, k, v)), spec, causal=False, form=form)
        torch.testing.assert_close(found[0, 0], expected)


def test_the_taylor_rnns_approach_softmax() -> None:
    q, k, v = (x[None, None] for x in normal(3, 12, 4))
    expected = formula.attention(q, k, v, sr.variant("softmax"), causal=True)
    errors = []
    for order in (2, 4, 8, 12):
        found = sr.attention(q, k, v, sr.variant("taylor", order=order), form="chunked")
        errors.append(float((found - expected).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_row_weights_keep_the_rows_of_their_degrees() -> None:
    a, b = normal(2, 5, 1)
    for name in ("taylor:3", "power:3", "linear_elu", "taylor:0"):
        spec = sr.variant(name.partition(":")[0], order=int(name[-1])) if ":" in name else None
        spec = spec or sr.variant(name)
        rows = state_rows(spec, 5)
        weights = row_weights(spec, 5)
        assert len(weights) == rows
        columns = [monomials(x, spec.order)[-rows:, 0] for x in (a, b)]
        score = (a.T @ b).squeeze()
        expected = {
            "taylor": sum(score**n / math.factorial(n) for n in range(spec.order + 1)),
            "power": score**spec.order,
        }[spec.series]
        torch.testing.assert_close((weights * columns[0]) @ columns[1], expected.squeeze())


def test_state_sizes() -> None:
    assert state_rows(sr.variant("taylor", order=2), 64) == 2145
    assert state_rows(sr.variant("taylor", order=3), 64) == 47905
    assert sr.state_size("taylor:2", 64, 64) == 2145 * 65  # and one weight sum a monomial
    assert sr.state_size("quadratic", 8, 6) == 36 * 6  # no denominator: none
    with pytest.raises(ValueError, match="no finite state"):
        sr.state_size("softmax", 64, 64)
