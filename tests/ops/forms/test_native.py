"""The native form: tiles, threads, and what happens where its library cannot be built."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED, Shape, assert_close, make_case
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.plan import planned

needs_library = pytest.mark.skipif(
    bool(cpp.missing()), reason="needs g++ and SOFTMAX_RNN_CPU_KERNEL other than 0"
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5}
SPECS = {
    "softmax": sr.variant("softmax"),
    "gate": sr.variant("gate"),
    "clamped": sr.AttentionSpec(clamp=0.5),  # relative to the largest score
    "taylor": sr.AttentionSpec(series="taylor", order=4, clamp=0.7),
    "linear_elu": sr.variant("linear_elu"),
    **{name: WIDENED[name] for name in ("fixed_polynomial", "forgetting", "forgetting_gate")},
    **{name: WIDENED[name] for name in ("taylor_token", "retention", "window")},
    "window_decay": sr.AttentionSpec(window=600, decay="token"),
    "window_power": sr.AttentionSpec(series="power", order=2, window=100, norm="l2"),
}


def chosen(
    x: Tensor, spec: sr.AttentionSpec, form: str = "auto", mask: Tensor | None = None
) -> str:
    """The form that computes a spec of queries, keys and values ``x``."""
    return planned(Call(x, x, x, spec, mask=mask), form, part=True).name


def long(length: int = cpp.LEAST_TOKENS) -> Tensor:
    return torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(0))


@needs_library
@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("name", SPECS)
def test_several_tiles_of_keys(name: str, mask: str) -> None:
    """A row's largest score may be in any tile; the last tile and block are short."""
    case = make_case(
        SPECS[name], shape=Shape(1, 2, 1, 151, 1127, 8, 6), mask=mask, decay=0.005, spread=2.0
    )
    expected = case.run(sr.attention, form="dense")
    for dtype, tolerance in TOLERANCE.items():
        found = case.run(sr.attention, dtype, form="native")
        assert_close(found, expected, tolerance, f"{dtype}")


@needs_library
@pytest.mark.parametrize("decay", [0.01, 1.0])
def test_keys_that_have_faded_are_skipped(decay: float) -> None:
    for name in ("forgetting", "taylor_token"):
        case = make_case(WIDENED[name], shape=Shape(1, 2, 2, 900, 930), decay=decay)
        expected = case.run(sr.attention, form="dense")
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            assert_close(case.run(sr.attention, dtype, form="native"), expected, tolerance, name)


@needs_library
@pytest.mark.parametrize("heads", [1, 3])
def test_threads_change_no_result(heads: int) -> None:
    """Tasks that share a key head have gradients of their own; only their sum is rounded."""
    case = make_case(WIDENED["forgetting_gate"], shape=Shape(1, 2 * heads, heads, 300, 300))
    one = case.run(sr.attention, torch.float32, form="native")
    torch.set_num_threads(2)
    found = [case.run(sr.attention, torch.float32, form="native") for _ in range(5)]
    for name, x in one.items():
        assert all(torch.equal(again[name], found[0][name]) for again in found)
        torch.testing.assert_close(found[0][name], x, rtol=1e-4, atol=1e-5)


@needs_library
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1e2, 1e4])
@pytest.mark.parametrize("name", ["softmax", "gate", "taylor", "linear_elu", "window_power"])
def test_sizes_of_scores(name: str, size: float) -> None:
    """Of scores themselves: their rounding in float32 is more than the weights differ by."""
    case = make_case(SPECS[name], shape=Shape(1, 2, 1, 70, 70))
    case.tensors["q"] *= size
    expected = case.run(sr.attention, form="dense")
    assert_close(case.run(sr.attention, form="native"), expected, 1e-8)
    if size <= 1:
        assert_close(case.run(sr.attention, torch.float32, form="native"), expected, 5e-5)


@needs_library
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["softmax", "gate", "fixed_polynomial"])
def test_inputs_that_are_not_finite_spread_to_the_same_rows(name: str, bad: float) -> None:
    for where in "qkv":
        case = make_case(SPECS[name], shape=Shape(1, 2, 1, 40, 40))
        case.tensors[where][0, 0, 7, 1] = bad
        rows = {}
        for form in ("dense", "native"):
            options = {key: x.float() for key, x in case.tensors.items()}
            out = sr.attention(spec=case.spec, form=form, **options)
            rows[form] = out[0, :, 7:].isfinite().all(-1)
        assert torch.equal(rows["dense"], rows["native"]), where


@needs_library
def test_rows_that_see_no_key() -> None:
    for name in ("softmax", "gate", "taylor"):
        case = make_case(SPECS[name], shape=Shape(1, 2, 1, 30, 30))
        mask = torch.zeros(1, 1, 1, 30, dtype=torch.bool)
        mask[..., 20:] = True
        case = dataclasses.replace(case, mask=mask)
        found = case.run(sr.attention, torch.float32, form="native")
        assert not found["out"][:, :, :20].any()
        assert_close(found, case.run(sr.attention, form="dense"), 5e-5)


@needs_library
@pytest.mark.parametrize("name", ["gate", "window_decay"])
def test_compiled_it_is_one_graph(name: str) -> None:
    case = make_case(SPECS[name], shape=Shape(1, 2, 1, 150, 150), mask="padding", decay=0.1)
    tensors = {key: x.float().requires_grad_() for key, x in case.tensors.items()}

    def attend(**tensors: Tensor) -> Tensor:
        return sr.attention(spec=case.spec, mask=case.mask, form="native", **tensors)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = (f(**tensors) for f in (compiled, attend))
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.sum(), list(tensors.values())) for x in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_library
def test_what_it_does_not_compute() -> None:
    for name in ("learned_polynomial", "exp_channel", "window_global"):
        assert "native" not in sr.forms(WIDENED[name])
    assert "native" not in sr.forms("gate", "cuda")
    x = long()
    mask = torch.ones(1, 1, len(x[0, 0]), len(x[0, 0]), dtype=torch.bool)
    assert chosen(x, SPECS["gate"], mask=mask) == "blocked"
    with pytest.raises(ValueError, match="cannot compute a mask per query or head on cpu"):
        chosen(x, SPECS["gate"], "native", mask)


@needs_library
def test_auto_takes_it_for_many_queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, load = [], cpp.load
    monkeypatch.setattr(cpp, "load", lambda: (loads.append(1), load())[1])
    assert chosen(long(159), SPECS["softmax"]) == "fused"
    few = {name: chosen(long(32), SPECS[name]) for name in ("softmax", "gate", "taylor")}
    assert few == {"softmax": "fused", "gate": "dense", "taylor": "dense"}
    assert not loads
    for length, name in ((160, "softmax"), (33, "gate"), (16, "linear_elu")):
        assert chosen(long(length), SPECS[name]) == "native"
    assert loads
    # The kernels of half types are faster than the conversion to float32.
    half = long().bfloat16()
    assert [chosen(half, SPECS[name]) for name in ("softmax", "gate")] == ["fused", "native"]


@needs_library
def test_auto_takes_it_until_states_cost_less() -> None:
    spec = sr.variant("taylor:4")
    crossover = sr.crossover(spec, 8, 8)
    assert crossover > 1024
    lengths = (256, crossover - 1, crossover, 2 * crossover)
    found = [chosen(long(length), spec) for length in lengths]
    assert found == ["native", "native", "chunked", "chunked"]


@needs_library
@pytest.mark.parametrize("name", ["forgetting", "taylor_token", "linear_elu"])
@pytest.mark.parametrize("form", ["native", "chunked"])
def test_tensors_are_made_on_the_device_of_the_inputs(name: str, form: str) -> None:
    x, spec = long(600), SPECS[name]
    if form not in sr.forms(spec):
        pytest.skip("exp has no chunks")
    decay = {} if spec.decay == "none" else {"log_decay": -torch.rand(1, 2, 600)}
    with torch.no_grad():
        expected = sr.attention(x, x, x, spec, form=form, **decay)
        with torch.device("meta"):
            found = sr.attention(x, x, x, spec, form=form, **decay)
    assert torch.equal(found, expected)
