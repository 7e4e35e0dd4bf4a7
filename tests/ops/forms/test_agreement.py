"""Every form agrees with dense in float64: outputs and all gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import softmax_rnn as sr
from cases import (
    INPUTS,
    LAYOUTS,
    MASKS,
    VARIANTS,
    WIDENED,
    Shape,
    assert_close,
    make_case,
    with_directions,
)
from softmax_rnn.ops.plan import FORMS
from softmax_rnn.ops.spec import AttentionSpec
from strategies import comparable, layouts, specs, widths

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(("name", "causal"), with_directions(VARIANTS))
def test_every_variant_and_form(name: str, causal: bool) -> None:
    spec = sr.variant(name)
    for mask in MASKS:
        case = make_case(spec, causal=causal, mask=mask)
        expected = case.run(sr.attention, form="dense")
        for form in case.forms:
            for dtype in (torch.float64, torch.float32):
                found = case.run(sr.attention, dtype, form=form)
                assert_close(found, expected, TOLERANCE[dtype], f"{form} {mask} {dtype}")


# Each mask with a weaker decay, a moderate and a stronger one.
FADING = {1e-3: ("none", "full"), 0.1: MASKS, 3.0: ("padding", "heads"), 100.0: ("none", "full")}


@pytest.mark.parametrize("decay", FADING)
@pytest.mark.parametrize("name", WIDENED)
def test_every_widened_spec_and_form(name: str, decay: float) -> None:
    spec = WIDENED[name]
    if spec.decay == "none" and decay != 0.1:
        pytest.skip("without a decay")
    for mask in FADING[decay]:  # with 100 and "heads" all weights of a row may underflow
        case = make_case(spec, mask=mask, decay=decay)
        expected = case.run(sr.attention, form="dense")
        for form in case.forms:
            found = case.run(sr.attention, form=form)
            assert_close(found, expected, 1e-10, f"{form} {mask}")
            # Where few weights are left, gradients cancel, and sums may leave float32's range.
            if decay < 1:
                found = case.run(sr.attention, torch.float32, form=form)
                assert_close(found, expected, 1e-4, f"{form} {mask} float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "norm", "gate", "taylor:4", "linear_elu", "detached"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = make_case(sr.variant(name), mask="padding")
    rounded = {key: x.to(dtype).double() for key, x in case.tensors.items()}
    case = dataclasses.replace(case, tensors=rounded, upstream=case.upstream.to(dtype).double())
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        assert_close(case.run(sr.attention, dtype, form=form), expected, TOLERANCE[dtype], form)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["softmax", "norm", "gate", "detached", "taylor:3", "both_gates"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(queries=300, keys=300, kv_heads=4),  # several blocks, the last one short
        Shape(queries=1, keys=33),  # one token against a cache
        Shape(queries=129, keys=260, heads=3, kv_heads=1),
        Shape(batch=1, heads=1, kv_heads=1, queries=1, keys=1, width=1, value_width=1),
        Shape(queries=20, keys=20, width=4, value_width=11),
    ],
    ids=["blocks", "decode", "one_kv_head", "tiny", "wide_values"],
)
def test_shapes(name: str, shape: Shape, causal: bool) -> None:
    spec = sr.variant(name)
    case = make_case(spec, causal=causal, shape=shape)
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=1, heads=2, kv_heads=2, queries=300, keys=300),
        Shape(queries=1, keys=33),
        Shape(queries=129, keys=260, heads=3, kv_heads=1),
        Shape(batch=1, heads=1, kv_heads=1, queries=1, keys=1, width=1, value_width=1),
    ],
    ids=["blocks", "decode", "one_kv_head", "tiny"],
)
@pytest.mark.parametrize("name", WIDENED)
def test_shapes_of_widened_specs(name: str, shape: Shape) -> None:
    case = make_case(WIDENED[name], shape=shape, mask="padding", decay=0.5)
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        if form == "recurrent" and shape.queries == 300:  # chunks of one token, and slow
            continue
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)


@pytest.mark.parametrize("mask", ["[S]", "[T, S]", "[B, 1, T, S]", "[1, H, 1, S]", "[B, 1, T, 1]"])
@pytest.mark.parametrize(
    "name", ["norm", "gate", "length", "softmax_plus_one", "window_decay", "exp_channel"]
)
def test_masks_that_broadcast(name: str, mask: str) -> None:
    case = make_case(WIDENED.get(name) or sr.variant(name))
    sizes = {"B": 2, "H": 4, "T": 37, "S": 41, "1": 1}
    shape = [sizes[letter] for letter in mask.strip("[]").split(", ")]
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    case = dataclasses.replace(case, mask=shown)
    full = dataclasses.replace(case, mask=shown.expand(2, 4, 37, 41))
    expected = full.run(sr.attention, form="dense")
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    ["softmax", "norm", "softmax_plus_one", "gate", "taylor:2", "window_decay", "taylor_channel"],
)
def test_layouts(name: str, layout: str) -> None:
    """Wherever the numbers of inputs and gradients lie in memory; float32 has the fast kernels."""
    shape = Shape(batch=1, queries=70, keys=70, width=16, value_width=16)
    case = make_case(WIDENED.get(name) or sr.variant(name), shape=shape)
    case = dataclasses.replace(case, layouts=dict.fromkeys(["q", "k", "v", "upstream"], layout))
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        for dtype in (torch.float64, torch.float32):
            found = case.run(sr.attention, dtype, form=form)
            assert_close(found, expected, TOLERANCE[dtype], f"{form} {dtype}")


# Specs whose forms skip keys, or choose scales, by bounds of the inputs.
BOUNDED: dict[str, AttentionSpec] = {
    name: WIDENED[name]
    for name in ("forgetting", "forgetting_gate", "exp_channel", "elu_token", "taylor_token")
} | {
    "elu_exp_token": AttentionSpec(feature_map="elu1", decay="token"),
    "cosine_exp_head": AttentionSpec(feature_map="cosine", scale=90.0, decay="head"),
    "window_decay": AttentionSpec(window=150, global_keys=2, decay="token"),
    "clamped_token": AttentionSpec(clamp=5.0, denominator="length", decay="token"),
    "relu_square_token": AttentionSpec(
        **{"feature_map": "relu", "series": "power", "order": 2},
        **{"decay": "token", "floor": 1e-3},
    ),
    "softmax": AttentionSpec(),
    "sink": WIDENED["sink"],
}
LONG = Shape(1, 2, 1, 260, 300, 4, 3)  # several blocks and chunks


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", BOUNDED)
def test_inputs_that_try_to_make_a_bound_lie(name: str, inputs: str) -> None:
    """In float32 as well, where a decay of e^-65 counts as zero and squares underflow early."""
    case = make_case(BOUNDED[name], shape=LONG, inputs=inputs, decay=0.4)
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-2)):
        tensors = {key: x.to(dtype).double() for key, x in case.tensors.items()}
        case = dataclasses.replace(case, tensors=tensors)
        expected = case.in_units(case.run(sr.attention, form="dense"))
        for form in case.forms:
            if form == "recurrent":  # chunks of one token, and slow for so many
                continue
            found = case.in_units(case.run(sr.attention, dtype, form=form))
            assert_close(found, expected, tolerance, f"{form} {dtype}")


HIDDEN: dict[str, AttentionSpec] = {
    "softmax": AttentionSpec(),
    "gate": AttentionSpec(denominator="none", norm="l2", input_gate=True),
    "taylor": AttentionSpec(series="taylor", order=2),
    "cubic": AttentionSpec(series="power", order=3, feature_map="relu", floor=1e-3),
    "elu_exp_token": BOUNDED["elu_exp_token"],
    "window_taylor_token": WIDENED["window_taylor_token"],
    "window_global": WIDENED["window_global"],
}


@pytest.mark.parametrize("shape", [Shape(), Shape(queries=1)], ids=["several", "one"])
@pytest.mark.parametrize("mask", ["padding", "heads"])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_hidden_keys_hold_never_matters(name: str, mask: str, shape: Shape) -> None:
    """NaN, infinity and scores that overflow, in outputs and gradients, with and without these."""
    case = make_case(HIDDEN[name], mask=mask, shape=dataclasses.replace(shape, outside_width=5))
    assert case.mask is not None
    shown = case.mask.any(-2)
    shown = shown.unflatten(1, (-1, 2)).any(2) if mask == "heads" else shown.expand(-1, 2, -1)
    assert not shown.all()
    for form in case.forms:
        expected = case.run(sr.attention, torch.float32, form=form)
        for bad in (torch.nan, -torch.inf, 1e38):
            tensors = {key: x.clone() for key, x in case.tensors.items()}
            for key in {"k", "v", "input_gate", "log_decay", "outside_k"} & tensors.keys():
                tensors[key][~shown] = -abs(bad) if key == "log_decay" else bad
            changed = dataclasses.replace(case, tensors=tensors)
            found = changed.run(sr.attention, torch.float32, form=form)
            assert_close(found, expected, 1e-5, f"{form} {bad}")
            with torch.no_grad():
                inputs = {key: x.float() for key, x in tensors.items()}
                out = sr.attention(spec=case.spec, mask=case.mask, form=form, **inputs)
            torch.testing.assert_close(out, expected["out"], msg=f"{form} {bad} no_grad")


def test_keys_whose_squares_underflow() -> None:
    """Their lengths would be zero in float32, and so would be a bound of their scores."""
    spec = AttentionSpec(decay="token", scale=1e25)
    case = make_case(spec, shape=LONG, inputs="dominating", decay=0.4)
    case.tensors["k"] *= 1e-25
    tensors = {name: x.float().double() for name, x in case.tensors.items()}
    case = dataclasses.replace(case, tensors=tensors)
    expected = case.in_units(case.run(sr.attention, form="dense"))
    for form in case.forms:
        found = case.in_units(case.run(sr.attention, torch.float32, form=form))
        assert_close(found, expected, 1e-2, form)


@given(
    spec=specs(),
    inputs=st.sampled_from(list(INPUTS)),
    decay=st.sampled_from([0.1, 0.01, 3.0]),
    causal=st.booleans(),
    backward=st.booleans(),
    mask=st.sampled_from(MASKS),
    queries=st.integers(1, 140) | st.integers(200, 520),
    past=st.integers(0, 20),
    widths=widths(),
    layout=layouts(),
    seed=st.integers(0, 999),
)
def test_any_spec(
    spec: AttentionSpec,
    inputs: str,
    decay: float,
    causal: bool,
    backward: bool,
    mask: str,
    queries: int,
    past: int,
    widths: tuple[int, int],
    layout: dict[str, str],
    seed: int,
) -> None:
    width, value_width = widths
    shape = Shape(1, 2, 1, queries, queries + past, width, value_width)
    if spec.feature_map == "relu" and spec.order not in (None, 0) and spec.row_sum:
        # A row whose every weight is zero has a gradient of any size beside it.
        spec = dataclasses.replace(spec, denominator="length", epsilon=0.0, floor=0.0)
    if not spec.shifted:  # forms agree on rows of which something is left: decays to e^-700
        decay = min(decay, 0.3)
    options: dict[str, Any] = {"inputs": inputs, "decay": decay, "backward": backward}
    case = make_case(spec, causal=causal, mask=mask, shape=shape, seed=seed, **options)
    case = dataclasses.replace(case, layouts=layout)
    expected = comparable(lambda: case.in_units(case.run(sr.attention, form="dense")))
    tolerance = 1e-8 if inputs == "normal" else 1e-4  # where sums cancel, little is left of them
    for form in case.forms:
        if form == "recurrent" and queries > 140:  # chunks of one token, and slow for so many
            continue
        found = case.in_units(case.run(sr.attention, form=form))
        assert_close(found, expected, tolerance, form)


@pytest.mark.parametrize("form", sr.forms("softmax"))
@pytest.mark.parametrize("name", ["softmax", "norm", "softmax_plus_one"])
def test_large_scores_do_not_overflow(name: str, form: str) -> None:
    """Scores in the hundreds, where exp overflows float32; float64 still holds them."""
    case = make_case(sr.variant(name), spread=8.0)
    expected = case.run(sr.attention, form="dense")
    assert_close(case.run(sr.attention, torch.float32, form=form), expected, 1e-3)


@pytest.mark.parametrize("form", sr.forms("softmax"))
def test_unnormalised_overflow_is_an_error(form: str) -> None:
    case = make_case(AttentionSpec(denominator="none"), spread=10.0)
    with pytest.raises(OverflowError, match="log-sum-exp is"):
        case.run(sr.attention, torch.float32, form=form)


@pytest.mark.parametrize("form", sorted({*sr.forms("softmax"), *sr.forms("taylor:2")} - {"triton"}))
def test_inputs_stay_as_they_were(form: str) -> None:
    case = make_case(sr.variant("taylor:2" if FORMS[form].stateful else "softmax"), mask="padding")
    before = {name: x.clone() for name, x in case.tensors.items()}
    case.run(sr.attention, form=form)
    for name, x in case.tensors.items():
        assert torch.equal(x, before[name])


def test_auto_takes_the_fused_kernel_wherever_an_identity_allows() -> None:
    """For short sequences on a CPU; for others the native form precedes both."""

    def first(spec: AttentionSpec | str, device: str = "cpu") -> str:
        others = ("native", "chunked", "recurrent")
        return next(name for name in sr.forms(spec, device) if name not in others)

    for name in ("softmax", "norm", "norm_gate_after", "softmax_plus_one"):
        assert first(name) == "fused"
    for name in ("gate", "taylor:4", "linear_elu", "norm_rms"):
        assert first(name) == "blocked"
    for name in ("forgetting", "exp_channel", "window", "window_global"):
        assert first(WIDENED[name]) == "blocked"
    assert "fused" not in sr.forms("softmax_plus_one", "mps")
    for device in ("cuda", "mps"):
        assert sr.forms("norm", device)[0] == "fused"


def test_memory_of_the_blocked_form_is_linear() -> None:
    """No tensor of the backward pass grows with the square of the length."""
    largest = {}
    for length in (512, 2048):
        case = make_case(
            sr.variant("gate"),
            shape=Shape(batch=1, heads=1, kv_heads=1, queries=length, keys=length),
        )
        with torch.profiler.profile(profile_memory=True) as profile:
            case.run(sr.attention, torch.float32, form="blocked")
        largest[length] = max(event.cpu_memory_usage for event in profile.events())
    assert largest[2048] <= 4.5 * largest[512]


@pytest.mark.parametrize("name", ["softmax", "norm", "softmax_plus_one", "taylor:2", "gate"])
def test_negative_scales(name: str) -> None:
    """A fused kernel multiplies its mask of minus infinities by the scale."""
    spec = sr.variant("taylor", order=2) if ":" in name else sr.variant(name)
    case = make_case(dataclasses.replace(spec, scale=-0.3), shape=Shape(queries=30, keys=30))
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)
