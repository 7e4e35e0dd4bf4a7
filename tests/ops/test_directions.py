"""Decays and windows of both directions: every form is held to the loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import softmax_rnn as sr
from cases import INPUTS, MASKS, WIDENED, Case, Shape, assert_close, make_case
from segmented import ids_of, one_by_one
from softmax_rnn.ops import directions, formula
from strategies import comparable, specs, widths

POSITIONAL = {name: spec for name, spec in WIDENED.items() if spec.positional}
DECAYED = {name: spec for name, spec in POSITIONAL.items() if spec.decay != "none"}
ODD = Shape(1, heads=2, kv_heads=1, queries=13, keys=13, width=3, value_width=2)
LONG = Shape(1, 2, 1, 301, 301, 4, 3)  # several blocks and chunks
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def drawn(name: str, shape: Shape = ODD, **options: Any) -> Case:
    return make_case(POSITIONAL[name], causal=False, shape=shape, **options)


@pytest.mark.parametrize("name", POSITIONAL)
def test_every_form_is_the_formula(name: str) -> None:
    """With the gradient of every argument: by the same distance, and with decays of each way."""
    masks = ("none", "heads", "full", "gaps")
    for backward in (False, True) if name in DECAYED else (False,):
        for mask in masks if backward or name not in DECAYED else ("none", "gaps"):
            shape = dataclasses.replace(ODD, outside_width=5 if backward else None)
            case = drawn(name, shape, mask=mask, backward=backward)
            expected = case.run(formula.attention)
            for form in case.forms:
                found = case.run(sr.attention, form=form)
                assert_close(found, expected, 1e-10, f"{form} {mask} {backward}")


@pytest.mark.parametrize("name", POSITIONAL)
def test_every_form_of_several_blocks_and_chunks(name: str) -> None:
    case = drawn(name, LONG, mask="padding", backward=name in DECAYED)
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        if form == "recurrent":  # chunks of one token, and slow for so many
            continue
        assert_close(case.run(sr.attention, form=form), expected, 1e-9, form)
        found = case.run(sr.attention, torch.float32, form=form)
        assert_close(found, expected, TOLERANCE[torch.float32], f"{form} float32")


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("name", POSITIONAL)
def test_few_tokens(name: str, tokens: int) -> None:
    case = drawn(name, dataclasses.replace(ODD, keys=tokens), backward=name in DECAYED)
    expected = case.run(formula.attention)
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["forgetting", "taylor_token", "taylor_channel", "window_taylor"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = drawn(name, Shape(keys=41), mask="padding", backward=name in DECAYED)
    rounded = {key: x.to(dtype).double() for key, x in case.tensors.items()}
    case = dataclasses.replace(case, tensors=rounded, upstream=case.upstream.to(dtype).double())
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        assert_close(case.run(sr.attention, dtype, form=form), expected, TOLERANCE[dtype], form)


def reversed_in_time(case: Case) -> Case:
    """The reversed tokens, with the decays of earlier and later keys exchanged."""
    names = "log_decay", "backward_log_decay"
    tensors = {name: case.tensors[name] for name in names if name in case.tensors}
    tensors = dict(zip(reversed(tensors), tensors.values(), strict=True))
    tensors = {**case.tensors, **tensors}
    tensors = {
        name: x.flip(2) if x.ndim > 2 and x.shape[2] > 1 else x for name, x in tensors.items()
    }
    mask = None if case.mask is None else case.mask.flip(3)
    return dataclasses.replace(case, tensors=tensors, mask=mask, upstream=case.upstream.flip(2))


@pytest.mark.parametrize("name", POSITIONAL)
def test_the_reversed_sequence_gives_the_reversed_output(name: str) -> None:
    spec = dataclasses.replace(POSITIONAL[name], global_keys=0)
    case = make_case(spec, causal=False, shape=ODD, mask="padding", backward=name in DECAYED)
    expected = case.run(sr.attention)["out"]
    found = reversed_in_time(case).run(sr.attention)["out"]
    torch.testing.assert_close(found.flip(2), expected)
    if name in DECAYED:  # not if the decays keep their direction
        kept = reversed_in_time(case).tensors
        kept |= {"log_decay": kept["backward_log_decay"], "backward_log_decay": kept["log_decay"]}
        found = dataclasses.replace(reversed_in_time(case), tensors=kept).run(sr.attention)["out"]
        assert not torch.allclose(found.flip(2), expected, atol=1e-4)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", ["taylor_token", "window", "window_taylor"])
def test_a_shifted_boundary_is_caught(
    name: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = drawn(name)
    expected = case.run(formula.attention)
    original = directions.after

    def moved(compute: Any, call: Any, distance: int) -> Any:
        return original(compute, call, distance + shift)

    monkeypatch.setattr(directions, "after", moved)
    monkeypatch.setattr("softmax_rnn.ops.window.after", moved)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(case.run(sr.attention), expected, 1e-3)


@pytest.mark.parametrize("window", [1, 2, 12, 13, 14, 2**40])
@pytest.mark.parametrize("outside", ["hidden", "series"])
def test_windows_of_any_width(outside: Any, window: int) -> None:
    for denominator in ("sum", "length"):
        spec = sr.AttentionSpec(
            **{"series": "taylor", "order": 2, "window": window, "outside": outside},
            **{"decay": "token", "denominator": denominator},
        )
        for mask in ("none", "gaps", "full"):
            case = make_case(spec, causal=False, shape=ODD, mask=mask, backward=True)
            expected = case.run(formula.attention)
            for form in case.forms:
                assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)


@pytest.mark.parametrize("name", ["window", "window_decay", "window_taylor_token"])
def test_padding_counts_in_no_window(name: str) -> None:
    """On the left, on the right and between: what is visible is as if it were alone."""
    case = drawn(name, dataclasses.replace(ODD, keys=21), backward=name in DECAYED)
    shown = torch.tensor([0, 0, *[1] * 6, 0, 0, 0, 0, 0, *[1] * 6, 0, 1]).bool()
    case = dataclasses.replace(case, mask=shown[None, None, None])
    own = {
        name: x[:, :, shown] if x.ndim > 2 and x.shape[2] == 21 else x
        for name, x in case.tensors.items()
    }
    expected = formula.attention(spec=case.spec, causal=False, **own)
    for form in case.forms:
        options: dict[str, Any] = {"mask": case.mask, "form": form, "causal": False}
        found = sr.attention(spec=case.spec, padding=True, **options, **case.tensors)
        torch.testing.assert_close(found[:, :, shown], expected, msg=form)
        slots = sr.attention(spec=case.spec, **options, **case.tensors)
        assert not torch.allclose(slots[:, :, shown], expected, atol=1e-3)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", ["forgetting", "exp_channel", "elu_token", "power_token"])
def test_inputs_that_try_to_make_a_bound_lie(name: str, inputs: str) -> None:
    case = drawn(name, LONG, inputs=inputs, decay=0.2, backward=True)
    expected = case.in_units(case.run(sr.attention, form="dense"))
    for form in case.forms:
        if form != "recurrent":
            found = case.in_units(case.run(sr.attention, form=form))
            assert_close(found, expected, 1e-5, form)


@pytest.mark.parametrize("name", ["forgetting", "taylor_token", "taylor_channel", "window_taylor"])
def test_gradients_are_those_of_differences(name: str) -> None:
    case = drawn(name, dataclasses.replace(ODD, keys=4), backward=name in DECAYED)
    names = list(case.tensors)

    def attend(*tensors: Tensor, form: str = "auto") -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        return sr.attention(spec=case.spec, causal=False, form=form, **given)

    given = [x.clone().requires_grad_() for x in case.tensors.values()]
    assert torch.autograd.gradcheck(attend, given, fast_mode=True)


def test_what_a_query_sees_may_all_have_faded() -> None:
    """Its own key is hidden, and e^-2000 is left of the next ones: their quotient is not lost."""
    x = torch.randn(1, 1, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    decay, mask = torch.zeros(1, 1, 5), torch.ones(1, 1, 5, 5).tril(-1).bool() | True
    decay[..., 0], mask[..., :2] = -2000.0, False
    spec, options = sr.AttentionSpec(decay="token"), {"causal": False, "mask": mask}
    masked = {"log_decay": torch.zeros(1, 1, 5), "backward_log_decay": decay}
    for form in sr.forms(spec):
        if form == "native":
            continue
        found = sr.attention(x, x, x, spec, form=form, **options, **masked)
        expected = sr.attention(x, x, x, "softmax", **options)
        torch.testing.assert_close(found[:, :, 2:], expected[:, :, 2:])


def comparable_norm(spec: sr.AttentionSpec, inputs: str, expected: dict[str, Tensor]) -> bool:
    """Whether a norm of extreme sums can be compared with the loops'.

    There, weights of exp underflow or their squares overflow, which leaves an output of 0, where
    the L2 norm has no derivative; and that of a single channel, 0, is a residue. In a state, powers
    of long keys may cancel in a numerator, and a norm enlarges what is left.
    """
    out = expected["out"]
    cancels = inputs in ("fading", "resets") and not spec.sign_definite
    return bool(out.any(-1).all()) and out.shape[-1] > 1 and not cancels


@given(
    spec=specs(),
    inputs=st.sampled_from(list(INPUTS)),
    decay=st.sampled_from([0.1, 1.0, 10.0]),
    mask=st.sampled_from([*MASKS, "gaps"]),
    causal=st.sampled_from([False, False, True]),
    backward=st.booleans(),
    tokens=st.integers(1, 9),
    widths=widths(),
    outside_width=st.sampled_from([None, 6, 1]),
    cuts=st.sets(st.integers(1, 8), max_size=4),
    seed=st.integers(0, 999),
)
def test_any_spec_is_the_formula(
    spec: sr.AttentionSpec,
    inputs: str,
    decay: float,
    mask: str,
    causal: bool,
    backward: bool,
    tokens: int,
    widths: tuple[int, int],
    outside_width: int | None,
    cuts: set[int],
    seed: int,
) -> None:
    """The loops share nothing with any form: ``dense`` joins two directions, as all others do."""
    shape = Shape(1, 2, 1, tokens, tokens, *widths, outside_width)
    options: dict[str, Any] = {"inputs": inputs, "decay": decay, "backward": backward}
    case = make_case(spec, causal=causal, mask=mask, shape=shape, seed=seed, **options)
    rows = [sorted(cut for cut in cuts if cut < tokens)]
    loops = one_by_one(rows, formula.attention)
    expected = comparable(lambda: case.in_units(case.run(loops)))
    assume(inputs == "normal" or spec.norm == "none" or comparable_norm(spec, inputs, expected))
    segments = ids_of(rows, tokens) if cuts else None
    for form in case.forms:
        found = case.in_units(case.run(sr.attention, form=form, segments=segments))
        assert_close(found, expected, 1e-6 if inputs == "normal" else 1e-4, form)


def power(order: int, **fields: Any) -> sr.AttentionSpec:
    return sr.AttentionSpec(series="power", order=order, **fields)


ZEROS = {
    "values": power(1, decay="token", denominator="none"),
    "values_l2": power(2, decay="token", denominator="none", norm="l2"),
    "scores": power(1, decay="token"),
    "scores_length": power(1, decay="token", denominator="length"),
}


@pytest.mark.parametrize("name", ZEROS)
def test_sums_that_happen_to_be_zero_have_gradients(name: str) -> None:
    """The first query's earlier keys: their values are 0, or the query is orthogonal to them."""
    spec = ZEROS[name]
    case = make_case(spec, causal=False, shape=ODD, decay=2.0, backward=True)
    if "values" in name:
        case.tensors["v"][:, :, 0] = 0.0
    else:
        case.tensors["q"][:, :, 0] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        case.tensors["k"][:, :, 0, 0] = 0.0
    expected = case.run(formula.attention)
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-9, form)


def test_keys_that_a_window_hides_on_one_side_hide_no_others() -> None:
    """Powers of a far longer key scale the sums of earlier keys, but not those of later ones."""
    case = make_case(power(4, window=2), causal=False, shape=ODD)
    case.tensors["k"].mul_(1e-8)[:, :, 0] = 1e4
    tensors = {name: x.float().double() for name, x in case.tensors.items()}
    case = dataclasses.replace(case, tensors=tensors)
    expected = case.in_units(case.run(formula.attention))
    for form in case.forms:
        found = case.in_units(case.run(sr.attention, torch.float32, form=form))
        assert_close(found, expected, 1e-4, form)


def test_channels_fade_below_the_range_of_float16() -> None:
    """No query sees its own key, so that all its weights have faded."""
    case = make_case(power(2, decay="channel"), causal=False, shape=ODD)
    case.tensors["log_decay"].fill_(-18.0)
    tensors = {name: x.half().double() for name, x in case.tensors.items()}
    mask = ~torch.eye(13, dtype=torch.bool)[None, None]
    case = dataclasses.replace(case, tensors=tensors, mask=mask, upstream=case.upstream.half())
    expected = case.run(sr.attention, form="dense")
    for form in case.forms:
        found = case.run(sr.attention, torch.float16, form=form)
        assert_close(found, expected, TOLERANCE[torch.float16], form)


@pytest.mark.parametrize("name", ["hidden", "series"])
def test_a_reset_ends_a_sequence_on_both_sides(name: str) -> None:
    """Also for a query whose own weights are all 0: nothing of the other sequence is left."""
    spec = power(1, decay="token", feature_map="relu")
    if name == "series":
        spec = power(1, decay="token", feature_map="relu", window=2, outside="series")
    case = make_case(spec, causal=False, shape=ODD, backward=True)
    if name == "series":  # nothing in its window is seen
        case = dataclasses.replace(case, mask=~torch.eye(13).bool()[None, None])
        case.mask[..., 7, 6:9] = False
    case.tensors["q"][:, :, 7] = -1.0
    case.tensors["q"][:, :, 7, 0] = 1.0
    case.tensors["k"][:, :, :8, 0] = -1.0
    case.tensors["k"][:, :, 8:, 0] = 1.0
    case.tensors["log_decay"][:, :, 8] = case.tensors["backward_log_decay"][:, :, 7] = -1e4
    for form in case.forms:
        out = case.run(sr.attention, form=form)["out"]
        assert not out[:, :, 7].any(), form
    case.tensors["backward_log_decay"].data[:, :, 7] = -5e3
    assert case.run(sr.attention, form=form)["out"][:, :, 7].all()


def test_the_same_distance_is_that_of_equal_decays() -> None:
    """A number per head fades both ways; a token's decay is on the way between two others."""
    for name in ("forgetting_head", "window_square_first_head"):
        case = drawn(name)
        expected = case.run(sr.attention)["out"]
        both = {**case.tensors, "backward_log_decay": case.tensors["log_decay"]}
        found = dataclasses.replace(case, tensors=both).run(sr.attention)["out"]
        torch.testing.assert_close(found, expected)
    case = drawn("forgetting")
    both = {**case.tensors, "backward_log_decay": case.tensors["log_decay"]}
    found = dataclasses.replace(case, tensors=both).run(sr.attention)["out"]
    assert not torch.allclose(found, case.run(sr.attention)["out"], atol=1e-3)
    later = torch.nn.functional.pad(case.tensors["log_decay"][:, :, 1:], (0, 1))
    both = {**case.tensors, "backward_log_decay": later}
    found = dataclasses.replace(case, tensors=both).run(sr.attention)["out"]
    torch.testing.assert_close(found, case.run(sr.attention)["out"])


@pytest.mark.parametrize("name", ["taylor_token", "window_taylor"])
def test_a_compiled_graph(name: str) -> None:
    case = drawn(name, dataclasses.replace(ODD, keys=40), backward=name in DECAYED)
    compiled = torch.compile(sr.attention, fullgraph=True, backend="aot_eager")
    assert_close(case.run(compiled), case.run(sr.attention), 1e-10)


def test_linear_time_is_planned() -> None:
    """Both directions in chunks; softmax with a decay in pairs."""
    q, k, v = torch.randn(3, 1, 4, 4096, 16).unbind(0)
    options = {"causal": False, "log_decay": -torch.rand(1, 4, 4096)}
    told = sr.explain(q, k, v, POSITIONAL["taylor_token"], **options)
    assert told["chunked"] == "computes it"
    assert sr.explain(q, k, v, "softmax+decay", **options)["chunked"].startswith("cannot compute")


X = torch.randn(1, 2, 5, 3)
DECAY = {"log_decay": -torch.rand(1, 2, 5)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": X[:, :, 1:]}, "queries and keys of the same tokens, not 4 queries and 5 keys"),
        ({"return_state": True}, "With causal=False a decay or a window has no state"),
        ({"backward_log_decay": -torch.rand(2)}, r"must have shape \[1, 2, 5\], not \[2\]"),
        ({"backward_log_decay": torch.rand(1, 2, 5)}, "backward_log_decay must be <= 0"),
        ({"backward_log_decay": torch.zeros(1, 2, 5).int()}, "of a floating-point dtype"),
        ({"backward_log_decay": -X[..., 0].abs(), "causal": True}, "it needs causal=False"),
        ({"form": "fused"}, "form='fused' cannot compute the series 'taylor'"),
    ],
)
def test_what_has_no_two_directions_says_so(options: dict[str, Any], message: str) -> None:
    given = {"q": X, "k": X, "v": X, "causal": False, **DECAY, **options}
    with pytest.raises(ValueError, match=message):
        sr.attention(spec=POSITIONAL["taylor_token"], **given)


def test_decays_of_later_keys_need_a_decay() -> None:
    with pytest.raises(ValueError, match="backward_log_decay was given, but this spec"):
        sr.attention(X, X, X, "softmax", causal=False, backward_log_decay=-torch.rand(1, 2, 5))
    spec = sr.AttentionSpec(series="taylor", order=2, window=2)
    with pytest.raises(ValueError, match=r"A window \(window=2\) has no recurrent form"):
        sr.attention(X, X, X, spec, causal=False, form="chunked")
