"""The plan: a call like an earlier one is not checked again, and takes the same way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import VARIANTS, WIDENED, Shape, make_case
from softmax_rnn.ops import plan
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.signature import signature

SPECS = {name: sr.variant(name) for name in ("softmax", "gate", "taylor:2", "length")} | {
    name: WIDENED[name]
    for name in ("window_taylor_token", "taylor_channel", "sink", "learned_polynomial_token")
}
STATEFUL = [name for name, spec in SPECS.items() if spec.has_state]


def changed(x: Tensor) -> Iterator[Any]:
    """What is given in place of a tensor: other sizes, types and devices, and no tensor."""
    for dim in range(x.ndim):
        yield torch.cat([x, x.narrow(dim, 0, 1)], dim)
    yield from (x.unsqueeze(0), x[0], x.to(torch.int64), x.to("meta"), x.tolist(), "x", None)


def outcome(call: Callable[[], Any]) -> tuple[type | None, str]:
    """The error of a call."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def differences(valid: Callable[[], Any], wrong: Callable[[], Any]) -> tuple[Any, Any]:
    """What a wrong call says first, and after a valid one."""
    plan.forget()
    first = outcome(wrong)
    plan.forget()
    valid()
    outcome(wrong)
    return first, outcome(wrong)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("queries", [3, 1])
def test_what_was_valid_once_hides_no_mistake(name: str, queries: int) -> None:
    case = make_case(SPECS[name], shape=Shape(2, 2, 1, queries, 3, 4, 4), mask="padding")
    given = {**case.tensors, "mask": case.mask}

    def attend(**options: Any) -> Any:
        return sr.attention(**{**given, **options}, spec=case.spec)

    for key, x in given.items():
        for value in changed(x):
            found = differences(attend, lambda at=key, to=value: attend(**{at: to}))
            assert found[0] == found[1], (key, value)
    for key in ("sink", "norm_bias", "outside_q", "length_power", "input_gate", "output_gate"):
        if key not in given:
            found = differences(attend, lambda at=key: attend(**{at: torch.ones(2)}))
            assert found[0] == found[1], key
            assert found[0][0] is ValueError
    for options in ({"form": "chunkd"}, {"form": "triton"}, {"causal": False}, {"padding": True}):
        found = differences(attend, lambda to=options: attend(**to))
        assert found[0] == found[1], options


@pytest.mark.parametrize("name", STATEFUL)
def test_what_was_a_valid_state_hides_no_mistake(name: str) -> None:
    case = make_case(SPECS[name], shape=Shape(2, 2, 1, 3, 3, 4, 4))
    _, state = sr.attention(**case.tensors, spec=case.spec, return_state=True)

    def attend(given: Any = state) -> Any:
        return sr.attention(**case.tensors, spec=case.spec, state=given, return_state=True)

    names = [field.name for field in dataclasses.fields(state) if field.name != "tokens"]
    wrong: list[Any] = [None, "state", state.sums]
    wrong += [dataclasses.replace(state, **{key: value}) for key in names for value in ("x", None)]
    for key, x in state.tensors.items():
        for value in changed(x):
            tensors = {**state.tensors, key: value}
            if isinstance(value, Tensor):
                wrong.append(state.from_tensors(state.spec, state.tokens, tensors))
    wrong.append(dataclasses.replace(state, recent=state.first, first=state.recent))
    wrong.append(dataclasses.replace(state, spec=sr.AttentionSpec(series="taylor", order=1)))
    for value in wrong:
        found = differences(attend, lambda to=value: attend(to))
        assert found[0] == found[1], value


@pytest.mark.parametrize("name", VARIANTS)
def test_every_plan_says_what_it_takes(name: str) -> None:
    spec = sr.variant(name)
    explained = sr.forms(spec, explain=True)
    assert tuple(form for form, lack in explained.items() if not lack) == sr.forms(spec)
    assert explained.keys() == plan.FORMS.keys()
    x = torch.zeros(1, 1, 2, 4)
    call = Call(x, x, x, spec)
    for form, lack in explained.items():
        if lack and spec.outside == "hidden":  # else each part has a plan of its own
            stateful = plan.FORMS[form].stateful  # whose errors say what has a state
            message = "" if stateful else f"form='{form}' cannot compute {re.escape(lack)} on cpu"
            with pytest.raises(ValueError, match=message):
                plan._plan(call, signature(call, form))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "options", [{}, {"mask": True}, {"state": True}, {"form": "dense"}], ids=str
)
def test_a_call_is_explained_as_it_is_computed(name: str, options: dict[str, Any]) -> None:
    spec = sr.variant(name)
    full = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    for length in (2, 40):
        case = make_case(spec, shape=Shape(1, 2, 1, length, length, 4, 4))
        given = {**case.tensors, "spec": spec, **options}
        if "mask" in options:
            given["mask"] = full[..., :length, :length]
        if "state" in options:
            if not spec.has_state:
                continue
            given |= {"state": None, "return_state": True}
        words = sr.explain(**given)
        assert words.keys() == plan.FORMS.keys()
        if spec.outside == "series":
            continue
        (taken,) = [form for form, why in words.items() if why == "computes it"]
        sr.attention(**given)
        given.pop("form", None)
        for form, why in words.items():
            if why.startswith("cannot compute") and not plan.FORMS[form].stateful:
                with pytest.raises(ValueError, match=re.escape(why)):
                    sr.attention(**given, form=form)
            elif not why.startswith("cannot compute"):
                sr.attention(**given, form=form)
        assert options.get("form", taken) == taken
        asked = planned_form(given)
        assert asked == taken or "form" in options


def planned_form(given: dict[str, Any]) -> str:
    """The form that ``auto`` takes for a call."""
    return plan.planned(Call(**given)).name


@pytest.mark.parametrize("name", ["softmax", "taylor:2", "norm"])
def test_tensors_of_another_type_or_layout(name: str) -> None:
    x = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"not torch.float8_e4m3fn. Allowed: float16, bfloat16"):
        sr.attention(*[x.to(torch.float8_e4m3fn)] * 3, name)
    with pytest.raises(
        ValueError, match=r"q must be dense \(torch.strided\), not torch.sparse_coo"
    ):
        sr.attention(*[x.to_sparse()] * 3, name)
    words: Any = []
    assert isinstance(sr.attention(x, x, x, name, padding=words, return_state=words), Tensor)


def test_an_empty_call_is_explained() -> None:
    x = torch.randn(1, 1, 0, 4)
    words = sr.explain(x, x, x)
    assert words["dense"] == "computes it"
    assert words["fused"].startswith("leaves what is empty")


def test_a_call_that_is_wrong_is_not_explained() -> None:
    x = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match="width"):
        sr.explain(x, x[..., :3], x)
    with pytest.raises(ValueError, match="Did you mean 'chunked'"):
        sr.explain(x, x, x, "taylor:2", form="chunkd")


def test_hidden_keys_of_one_query_without_numbers() -> None:
    q, k = torch.zeros(1, 1, 1, 4, device="meta"), torch.zeros(1, 1, 5, 4, device="meta")
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool, device="meta")
    for spec in ("softmax", "norm"):
        assert sr.attention(q, k, k, spec, mask=mask).shape == q.shape


def test_the_plans_are_as_few_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST", 3)
    for length in range(1, 9):
        x = torch.randn(1, 1, length, 4)
        sr.attention(x, x, x, "softmax")
        assert len(plan._PLANS) <= 3


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_plan_for_fewer_keys_hides_no_mistake(decay: Any) -> None:
    """Where heads or channels are as many as keys, decays of one are not those of the other."""
    spec = sr.AttentionSpec(decay=decay)
    right, wrong = ((2,), (3,)) if decay == "head" else ((1, 2, 2, 2), (1, 2, 2, 3))

    def attend(keys: int, shape: tuple[int, ...]) -> Tensor:
        q, k = torch.randn(1, 2, 1, 2), torch.randn(1, 2, keys, 2)
        return sr.attention(q, k, k, spec, log_decay=-torch.rand(shape))

    found = differences(lambda: attend(2, right), lambda: attend(3, wrong))
    assert found[0] == found[1]
    assert found[0][0] is ValueError


@pytest.mark.parametrize("masked", [False, True])
def test_decoding_needs_few_plans(masked: bool) -> None:
    """Each token has a key more than the one before."""
    plan.forget()
    k, decay = torch.randn(1, 2, 300, 4), -torch.rand(1, 2, 300)
    for keys in range(1, 300):
        options: dict[str, Any] = {"mask": torch.ones(1, 1, 1, keys).bool()} if masked else {}
        given = k[:, :, :keys]
        sr.attention(k[:, :, :1], given, given, "softmax", **options)
        found = sr.attention(
            k[:, :, :1], given, given, "forgetting", log_decay=decay[..., :keys], **options
        )
    assert len(plan._PLANS) <= 2 * 10
    wanted = sr.attention(
        k[:, :, :1], given, given, "forgetting", log_decay=decay[..., :299], form="dense"
    )
    torch.testing.assert_close(found, wanted)


def test_memory_is_asked_for_whatever_was_trained_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept for the gradient of queries, not for that of decays alone."""
    asked = []
    monkeypatch.setattr(plan, "require_memory", lambda *_: asked.append(1))
    q, k, v = torch.randn(3, 1, 1, 300, 4).unbind(0)
    decay = (-torch.rand(1, 1, 300)).requires_grad_()
    for x in (q, q.clone().requires_grad_()):
        sr.attention(x, k, v, "taylor:2+decay", log_decay=decay, form="chunked")
    assert len(asked) == 2


def test_extra_tensors_are_real() -> None:
    x = torch.randn(1, 2, 5, 4)
    spec = sr.AttentionSpec(denominator="sum_plus_sink")
    with pytest.raises(ValueError, match="sink must be of real numbers, not of torch.complex64"):
        sr.attention(x, x, x, spec, sink=torch.zeros(2, dtype=torch.complex64))


def test_words_for_a_direction_and_a_form() -> None:
    x = torch.randn(1, 1, 5, 4)
    for causal in (np.True_, 1, np.False_, 0):
        found = sr.attention(x, x, x, "softmax", causal=causal)
        assert torch.equal(found, sr.attention(x, x, x, "softmax", causal=bool(causal)))
    with pytest.raises(ValueError, match=r"\['auto'\]"):
        sr.attention(x, x, x, "softmax", form=["auto"])
