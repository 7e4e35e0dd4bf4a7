"""The forms with a state: however a sequence is cut, and whatever is fed to it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_by_sums import state_by_sums
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close, make_case
from softmax_rnn.ops import formula
from softmax_rnn.ops.work import FEATURES
from strategies import coefficients, layouts

PER_TOKEN = ("input_gate", "output_gate", "log_decay")  # log decays of heads have one dimension
DECAYS = ("none", "head", "token", "channel")
WITH_STATE = [
    name for name, spec in WIDENED.items() if spec.has_state and spec.outside == "hidden"
]  # test_window.py has the others
DENOMINATORS = (
    *("sum", "detached_sum", "clamped_sum", "sum_plus_one"),
    *("length", "learned_length", "none"),
)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def in_pieces(case: Case, cuts: Sequence[int], form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The case computed piece by piece, the state handed on: outputs and every gradient."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, spec: sr.AttentionSpec, *, mask: Tensor | None, **extras
    ) -> Tensor:
        state, outs = None, []
        ends = [0, *cuts, q.shape[2]]
        for start, stop in itertools.pairwise(ends):
            here = slice(start, stop)
            cut = {
                name: x[:, :, here] if name in PER_TOKEN and x.ndim > 1 else x
                for name, x in extras.items()
            }
            out, state = sr.attention(
                q[:, :, here],
                k[:, :, here],
                v[:, :, here],
                spec,
                mask=None if mask is None else mask[..., here],
                state=state,
                return_state=True,
                form=form,
                **cut,
            )
            outs.append(out)
        assert state is not None
        assert state.tokens == q.shape[2]
        return torch.cat(outs, dim=2)

    return case.run(attend, dtype)


@given(
    series=st.sampled_from(["taylor", "power", "polynomial"]),
    order=st.integers(0, 10),
    fixed=st.none() | coefficients(),
    decay=st.sampled_from(DECAYS),
    speed=st.sampled_from([1e-3, 0.1, 100.0]),
    feature_map=st.sampled_from(["identity", "elu1", "relu", "cosine"]),
    denominator=st.sampled_from(DENOMINATORS),
    norm=st.sampled_from(["none", "l2", "rms", "layer"]),
    gates=st.sampled_from([(False, "none"), (True, "before_norm"), (False, "after_norm")]),
    mask=st.sampled_from(["none", "padding"]),
    length=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 150), max_size=3),
    form=st.sampled_from(["auto", "chunked", "recurrent"]),
    layout=layouts(),
    seed=st.integers(0, 999),
)
def test_any_split_of_any_finite_series(
    series: str,
    order: int,
    fixed: tuple[float, ...] | None,
    decay: str,
    speed: float,
    feature_map: str,
    denominator: str,
    norm: str,
    gates: tuple[bool, str],
    mask: str,
    length: int,
    cuts: list[int],
    form: str,
    layout: dict[str, str],
    seed: int,
) -> None:
    """Equal to dense in float64 to 1e-10, gradients through the states included."""
    if series == "power" and (norm != "none" or order > 4):
        # A single power of a small product is a sum of large monomials, even in float64.
        feature_map = "elu1"
    if series == "polynomial":
        order = min(order, 4) if fixed is None else len(fixed) - 1
    else:
        fixed = None
    spec = sr.AttentionSpec(
        feature_map=feature_map,
        series=series,
        order=order,
        coefficients=fixed,
        decay=decay,
        scale=0.3,
        denominator=denominator,
        norm=norm,
        input_gate=gates[0],
        output_gate=gates[1],
        epsilon=0.1 if denominator in ("sum", "detached_sum") else 0.0,
    )
    if not spec.sign_definite and denominator in ("sum", "detached_sum", "sum_plus_one"):
        spec = dataclasses.replace(spec, denominator="sum", floor=0.5)  # away from its zeros
    shape = Shape(batch=2, heads=2, kv_heads=1, queries=length, keys=length, width=3, value_width=2)
    case = make_case(spec, mask=mask, shape=shape, seed=seed, decay=speed)
    case = dataclasses.replace(case, layouts=layout)
    expected = case.run(sr.attention, form="dense")
    cuts = sorted(cut for cut in cuts if cut <= length)
    assert_close(in_pieces(case, cuts, form, torch.float64), expected, 1e-10, f"{spec} {cuts}")


@pytest.mark.parametrize("speed", [1e-3, 100.0])
@pytest.mark.parametrize("name", WITH_STATE)
def test_decays_and_polynomials_in_pieces(name: str, speed: float) -> None:
    """In float64 and float32; a chunk and more, a piece without tokens, keys before the queries."""
    for shape in (Shape(queries=300, keys=300), Shape(queries=90, keys=101)):
        case = make_case(WIDENED[name], mask="padding", shape=shape, decay=speed)
        expected = case.run(sr.attention, form="dense")
        for form in ("chunked", "recurrent")[: 1 + (shape.queries < 100)]:
            # The gradient of a fast decay is small beside the products that it is a difference of.
            cancels = speed > 1 and WIDENED[name].decay != "channel"
            rounding = 2e-2 if cancels else 2e-4
            for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, rounding)):
                note = f"{form} {speed} {shape}"
                assert_close(case.run(sr.attention, dtype, form=form), expected, tolerance, note)
                if shape.queries == shape.keys:
                    found = in_pieces(case, [33, 33, 190], form, dtype)
                    assert_close(found, expected, tolerance, f"in pieces {note}")


@pytest.mark.parametrize("name", WITH_STATE)
def test_small_widened_cases_are_the_formula(name: str) -> None:
    shape = Shape(batch=1, queries=7, keys=7, width=3, value_width=2)
    case = make_case(WIDENED[name], shape=shape)
    expected = case.run(formula.attention)
    for form in ("chunked", "recurrent"):
        assert_close(in_pieces(case, [2, 3], form, torch.float64), expected, 1e-10, form)


@pytest.mark.parametrize("name", WITH_STATE)
def test_gradients_through_outputs_and_a_returned_state(name: str) -> None:
    """Of every input, through states given as well."""
    spec = WIDENED[name]
    case = make_case(spec, shape=Shape(queries=40, keys=40, width=3, value_width=2))

    def grads(cuts: Sequence[int], form: str) -> dict[str, Tensor]:
        inputs = {key: x.clone().requires_grad_() for key, x in case.tensors.items()}
        state, total = None, torch.zeros((), dtype=torch.float64)
        for start, stop in itertools.pairwise([0, *cuts, 40]):
            cut = {
                key: x[:, :, start:stop] if key in (*PER_TOKEN, *"qkv") and x.ndim > 1 else x
                for key, x in inputs.items()
            }
            out, state = sr.attention(
                *(cut.pop(x) for x in "qkv"), spec, **cut, state=state, return_state=True, form=form
            )
            total = total + out.sum()
        weights = torch.linspace(-1, 1, state.sums.numel(), dtype=torch.float64)
        total = total + weights @ state.sums.flatten()
        found = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
        return dict(zip(inputs, found, strict=True))

    expected = state_by_sums(case)
    for form, cuts in (("chunked", []), ("chunked", [11]), ("recurrent", [1, 30])):
        assert_close(grads(cuts, form), expected, 1e-10, f"{form} {cuts}")


@pytest.mark.parametrize("form", ["blocked", "chunked", "recurrent"])
@pytest.mark.parametrize("order", range(11))
def test_every_order(order: int, form: str) -> None:
    shape = Shape(batch=1, heads=2, kv_heads=1, queries=277, keys=277, width=3, value_width=5)
    case = make_case(sr.AttentionSpec(series="taylor", order=order, floor=0.5), shape=shape)
    assert_close(
        case.run(sr.attention, form=form), case.run(sr.attention, form="dense"), 1e-10, form
    )


@pytest.mark.parametrize("feature_map", ["identity", "elu1", "relu", "cosine"])
@pytest.mark.parametrize("series", ["taylor", "power"])
@pytest.mark.parametrize("order", range(11))
def test_every_order_series_and_map_in_pieces(order: int, series: str, feature_map: str) -> None:
    """Denominators and norms in turn, so that each meets every map and both series."""
    turn = order + 3 * ["identity", "elu1", "relu", "cosine"].index(feature_map)
    spec = sr.AttentionSpec(
        feature_map=feature_map,
        series=series,
        order=order,
        scale=0.3,
        denominator=DENOMINATORS[turn % len(DENOMINATORS)],
        norm=("none", "l2", "rms", "layer")[turn % 4],
    )
    if spec.row_sum is not None:
        if not spec.sign_definite:  # away from its zeros
            spec = dataclasses.replace(spec, denominator="sum", floor=0.5)
        elif spec.denominator in ("sum", "detached_sum"):
            spec = dataclasses.replace(spec, epsilon=0.1)
    shape = Shape(batch=1, heads=2, kv_heads=1, queries=73, keys=73, width=3, value_width=2)
    case = make_case(spec, mask="padding", shape=shape, seed=turn)
    expected = case.run(sr.attention, form="dense")
    for form in ("chunked", "recurrent"):
        found = in_pieces(case, [17, 18], form, torch.float64)
        assert_close(found, expected, 1e-10, f"{form} {spec}")


@pytest.mark.parametrize("name", ["taylor:2", "linear_elu", "quadratic", "length_of_powers"])
@pytest.mark.parametrize(
    ("causal", "queries", "keys"),
    [(True, 1, 1), (True, 257, 600), (True, 300, 300), (False, 257, 600), (False, 5, 1)],
)
def test_several_chunks(name: str, causal: bool, queries: int, keys: int) -> None:
    """Keys before the first query, more queries than keys, heads in groups; in pieces of heads."""
    if name == "length_of_powers":
        spec = sr.AttentionSpec(series="taylor", order=3, denominator="length")
    else:
        family, _, order = name.partition(":")
        spec = sr.variant(family, order=int(order)) if order else sr.variant(name)
    shape = Shape(queries=queries, keys=keys, width=4)
    case = make_case(spec, causal=causal, mask="padding", shape=shape)
    expected = case.run(sr.attention, form="dense")
    for form in ("chunked", "recurrent"):
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)


def test_head_groups_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(sr.variant("taylor", order=3), shape=Shape(queries=150, keys=150))
    expected = case.run(sr.attention, form="chunked")
    monkeypatch.setitem(FEATURES, "cpu", 1)
    assert_close(case.run(sr.attention, form="chunked"), expected, 1e-14)


def test_the_state_of_half_inputs_is_float32() -> None:
    case = make_case(sr.variant("taylor", order=2), shape=Shape(queries=200, keys=200))
    q, k, v = (case.tensors[name].bfloat16() for name in "qkv")
    out, state = sr.attention(q, k, v, "taylor:2", return_state=True)
    assert out.dtype == torch.bfloat16
    assert state.sums.dtype == torch.float32
    expected = sr.attention(q.double(), k.double(), v.double(), "taylor:2", form="dense")
    assert float((out - expected).norm() / expected.norm()) < 4e-3


def test_the_gradient_of_a_returned_state() -> None:
    """A loss on the state itself, and on what a later call makes of it."""
    case = make_case(sr.variant("taylor", order=3), shape=Shape(queries=140, keys=140, width=4))

    def state_of(form: str) -> list[Tensor]:
        q, k, v = (case.tensors[name].clone().requires_grad_() for name in "qkv")
        _, state = sr.attention(q, k, v, case.spec, form=form, return_state=True)
        weights = torch.linspace(-1, 1, state.sums.numel(), dtype=torch.float64)
        return list(torch.autograd.grad(weights @ state.sums.flatten(), (k, v)))

    for a, b in zip(state_of("chunked"), state_of("recurrent"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("order", "width"), [(4, 16), (6, 16), (4, 32)])
def test_a_sum_below_its_rounding_error_divides_nothing(order: int, width: int) -> None:
    """Early tokens whose power is tiny beside the monomials it is a sum of."""
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, 1, 4, 8, width, generator=draw).unbind(0)
        v = 2 * torch.rand(1, 4, 8, width, generator=draw) - 1
        stream = sr.Stream(sr.variant("power", order=order))
        pieces = zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True)
        out = torch.cat([stream(*piece) for piece in pieces], dim=2)
        assert out.abs().max() <= 1.5, seed


@pytest.mark.parametrize("hidden", [torch.nan, torch.inf, 1e25])
@pytest.mark.parametrize("form", ["dense", "blocked", "chunked", "recurrent"])
def test_a_hidden_key_may_hold_anything(form: str, hidden: float) -> None:
    case = make_case(sr.variant("taylor", order=4), shape=Shape(queries=20, keys=20))
    q, k, v = (case.tensors[name] for name in "qkv")
    mask = torch.arange(20) >= 3
    expected = sr.attention(q, k, v, case.spec, mask=mask, form=form)
    k = k.masked_fill(~mask.view(1, 1, 20, 1), hidden)
    torch.testing.assert_close(sr.attention(q, k, v, case.spec, mask=mask, form=form), expected)


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize(("order", "size"), [(12, 1e3), (8, 1e-5)])
def test_keys_and_queries_of_unlike_size(form: str, order: int, size: float) -> None:
    """Ordinary scores of large keys and small queries: no power of either overflows."""
    shape = Shape(batch=1, heads=1, kv_heads=1, queries=300, keys=300, width=3)
    case = make_case(sr.variant("taylor", order=order), shape=shape)
    q, k, v = (case.tensors[name].float() for name in "qkv")
    expected = sr.attention(q, k, v, case.spec, form="blocked")
    found = sr.attention(q / size, k * size, v, case.spec, form=form)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


SIZES = (1e-3, 0.1, 1.0, 10.0, 3e3, 1e4)


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize(
    ("name", "width"),
    [("taylor:2", 8), ("taylor:4", 4), ("taylor:8", 3), ("power:2", 8), ("power:4", 3)],
)
def test_states_of_keys_and_queries_of_any_size(name: str, width: int, form: str) -> None:
    """Every row against float64; where sums or states are beyond float32 that is an error."""
    spec = sr.variant(name)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 2, 150, width, generator=draw, dtype=torch.float64)
    sizes = list(itertools.product(SIZES, SIZES))
    too_large = [max(key, key * query) ** spec.order > 1e28 for key, query in sizes]

    def attend(sizes: list[tuple[float, float]]) -> Tensor:
        """The largest error of each row, of all sizes at once."""
        key, query = torch.tensor(sizes, dtype=torch.float64).view(-1, 2, 1, 1, 1).unbind(1)
        q, k, v = query * x[0], key * x[1], x[2].expand(len(sizes), -1, -1, -1)
        expected = sr.attention(q, k, v, spec, form="dense")
        found, _ = sr.attention(q.float(), k.float(), v.float(), spec, return_state=True, form=form)
        return (found - expected).norm(dim=-1) / expected.norm(dim=-1)

    error = attend([size for size, large in zip(sizes, too_large, strict=True) if not large])
    assert error.max() < 1e-2
    assert error.median() < 1e-5
    for size, large in zip(sizes, too_large, strict=True):
        if large and form == "chunked":
            with contextlib.suppress(OverflowError):
                assert attend([size]).max() < 1e-2, size


@pytest.mark.parametrize("name", ["taylor:2", "clamped", "norm"])
def test_hand_written_backward_passes_ignore_autocast(name: str) -> None:
    family, _, order = name.partition(":")
    spec = sr.variant(family, order=int(order)) if order else sr.variant(name)
    case = make_case(spec, shape=Shape(queries=40, keys=40))
    for form in {"fused", "blocked", "chunked"}.intersection(case.forms):
        x = {key: tensor.float().requires_grad_() for key, tensor in case.tensors.items()}
        loss = sr.attention(*x.values(), spec, form=form).square().sum()
        expected = torch.autograd.grad(loss, list(x.values()), retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, list(x.values()))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, msg=form)


def test_fake_tensors_leave_no_trace() -> None:
    """What a trace without data makes is not kept for the next call with data."""
    with FakeTensorMode():
        q = torch.randn(1, 1, 700, 5)
        assert sr.attention(q, q, q, "taylor:3", form="chunked").shape == q.shape
        assert sr.attention(q[:, :, :2], q[:, :, :2], q[:, :, :2], "taylor:3").shape[2] == 2
    q = torch.randn(1, 1, 700, 5)
    assert sr.attention(q, q, q, "taylor:3", form="chunked").isfinite().all()
