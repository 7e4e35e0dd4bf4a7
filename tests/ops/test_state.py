"""A state: what it must be for a call, what it takes, and what it says of bad numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import softmax_rnn as sr
from cases import Shape, make_case

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_keys_without_queries_only_move_the_state() -> None:
    case = make_case(sr.variant("taylor", order=2), shape=Shape(queries=40, keys=40))
    q, k, v = (case.tensors[name] for name in "qkv")
    none, state = sr.attention(q[:, :, :0], k, v, case.spec, return_state=True)
    assert none.shape[2] == 0
    _, expected = sr.attention(q, k, v, case.spec, return_state=True)
    torch.testing.assert_close(state.sums, expected.sums)


def state_for(spec: sr.AttentionSpec | str = "taylor:2", **sizes: int) -> sr.State:
    shape = {"batch": 1, "heads": 2, "length": 4, "width": 3, **sizes}
    x = torch.zeros(shape["batch"], shape["heads"], shape["length"], shape["width"])
    return sr.attention(x, x, x, spec, return_state=True)[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"state": lambda: state_for("taylor:3")},
            r"another spec \(order: 3 there, 2 here; floor: 1.0 there, 0.0 here\)\.$",
        ),
        ({"state": lambda: state_for(width=4)}, r"must have shape \[1, 2, 4, 10\]"),
        ({"state": lambda: state_for(batch=2)}, r"not \[2, 2, 4, 10\]"),
        ({"state": lambda: {"sums": 1}}, "must be a softmax_rnn.State, not dict"),
        ({"dtype": torch.float64}, "must be torch.float64 on cpu for torch.float64 inputs"),
        ({"spec": "softmax", "state": lambda: None}, r"order=\d+ is within 0.001 of exp"),
        ({"spec": "softmax", "form": "chunked", "return_state": False}, "no finite state"),
        ({"spec": "length", "state": lambda: None}, "clamped score"),
        ({"form": "blocked"}, "with a state on cpu; forms that can: chunked, recurrent"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, r"\[B, 1, 1, S\], not \[1, 1, 4, 4\]"),
    ],
)
def test_mistakes_are_named(change: dict, message: str) -> None:
    dtype = change.pop("dtype", torch.float32)
    x = torch.zeros(1, 2, 4, 3, dtype=dtype)
    arguments = {"spec": "taylor:2", "state": state_for, "return_state": True, **change}
    spec = arguments.pop("spec")
    state = arguments.pop("state")()
    if spec == "softmax":
        state = None
    with pytest.raises(ValueError, match=message):
        sr.attention(x, x, x, spec, state=state, **arguments)


def test_a_state_prints_one_line() -> None:
    text = "AttentionSpec(series='taylor', order=2, scale=1.0)"
    spec = sr.AttentionSpec(series="taylor", order=2, scale=1.0)
    assert repr(spec) == text
    assert eval(repr(spec), {"AttentionSpec": sr.AttentionSpec}) == spec
    state, stream = state_for(spec), sr.Stream(spec)
    assert repr(state) == f"State({text}, 4 tokens, {state.nbytes} bytes)"
    assert repr(stream) == f"Stream({text}, 0 tokens, 0 bytes)"
    stream(*torch.zeros(3, 1, 2, 4, 3).unbind(0))
    assert repr(stream) == f"Stream({text}, 4 tokens, {stream.nbytes} bytes)"


def test_only_an_order_with_a_reasonable_state_is_suggested() -> None:
    x = torch.ones(1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"order=9 is within 0.001 .* state of 27.9 KiB\.$"):
        sr.attention(x, x, x, "softmax", return_state=True)
    with pytest.raises(ValueError, match=r"27.9 KiB\. Without a state, use form='auto'"):
        sr.attention(x, x, x, "softmax", form="chunked")
    wide = torch.full((1, 2, 4, 16), 1.6)
    with pytest.raises(ValueError, match=r"no Taylor .* reasonable size: order=\d\d .* TiB\.$"):
        sr.attention(wide, wide, wide, "softmax", return_state=True)
    with pytest.raises(ValueError, match=r"<= 4e\+04, and no Taylor series .* reasonable size\.$"):
        sr.attention(100 * x, 200 * x, x, "softmax", return_state=True)
    with pytest.raises(ValueError, match=r"the layer 'window_state:3' has; or keep the last keys"):
        sr.attention(x, x, x, "window:3", return_state=True)


def test_a_state_too_large_says_which_order_fits() -> None:
    x = torch.zeros(1, 8, 4, 128)
    with pytest.raises(MemoryError, match=r"[\d,]+ bytes .* the largest order that fits is [234]"):
        sr.attention(x, x, x, "taylor:6", form="chunked")


def test_memory_counts_monomials_and_the_states_kept_to_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("softmax_rnn.ops.state._SMALL", 0)
    free = 40_000_000
    monkeypatch.setattr("softmax_rnn.ops.state._free_bytes", lambda device: free)
    x = torch.zeros(1, 1, 8192, 16)
    with torch.no_grad():
        sr.attention(x, x, x, "taylor:3", form="chunked")
    trained = x.clone().requires_grad_()
    free = 3_000_000  # a state of 66 kB, and 64 of them kept
    with pytest.raises(MemoryError, match="the largest order that fits is 2"):
        sr.attention(trained, x, x, "taylor:3", form="chunked")
    many = torch.zeros(1, 16, 600, 16)  # 16 query heads on one key: monomials of 17 columns each
    with torch.no_grad(), pytest.raises(MemoryError, match="with working memory"):
        sr.attention(many, many[:, :1], many[:, :1], "taylor:3", form="chunked")
    assert sr.attention(trained, x, x, "taylor:3").shape == x.shape  # auto takes another form


def test_nan_is_reported_with_the_token() -> None:
    q, k, v = torch.randn(3, 1, 2, 10, 3).unbind(0)
    _, state = sr.attention(q, k, v, "taylor:2", return_state=True)
    bad = v.clone()
    bad[0, 1, 6] = torch.nan
    with pytest.raises(FloatingPointError, match="The value of token 16 contains NaN"):
        sr.attention(q, k, bad, "taylor:2", state=state, return_state=True)
    long = k.clone()
    long[0, 0, 3] = 1e30
    with pytest.raises(OverflowError, match=r"state overflows torch.float32 .* of token 13"):
        sr.attention(q, long, v, "taylor:2", state=state, return_state=True)
    poisoned = dataclasses.replace(state, sums=state.sums * torch.nan)
    with pytest.raises(FloatingPointError, match="given state contains NaN or infinity, after 10"):
        sr.attention(q, k, v, "taylor:2", state=poisoned, return_state=True)


def test_rows_of_a_state_can_be_picked() -> None:
    case = make_case(sr.variant("taylor", order=2), mask="padding", shape=Shape(kv_heads=4))
    q, k, v = (case.tensors[name][:, :, :37] for name in "qkv")
    mask = case.mask[..., :37]
    _, state = sr.attention(q, k, v, case.spec, mask=mask, return_state=True)
    swapped = state.select(torch.tensor([1, 0, 1]))
    assert swapped.visible.tolist() == [27, 37, 27]
    assert torch.equal(swapped.sums[1], state.sums[0])
    assert swapped.nbytes == state.nbytes * 3 // 2


def test_an_overflow_of_the_last_keys_is_told_at_once() -> None:
    q, k, v = torch.randn(3, 1, 1, 3, 4).unbind(0)
    k[..., 2, :] = 1e20
    with pytest.raises(OverflowError, match="state overflows torch.float32"):
        sr.attention(q * 1e-20, k, v, "taylor:2", return_state=True)


@pytest.mark.parametrize("name", ["taylor:2", "power:1", "linear_elu", "taylor:2+decay"])
@pytest.mark.parametrize("bad", ["key", "value", "log decay"])
def test_nan_is_reported_without_a_query_as_well(name: str, bad: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    given = {"key": k.clone(), "value": v.clone()}
    if "decay" in name:
        given["log decay"] = -torch.rand(1, 2, 6)
    if bad not in given:
        return
    given[bad][0, 0, 3] = torch.nan
    options = {"log_decay": given["log decay"]} if "decay" in name else {}
    for queries in (0, 6):
        with pytest.raises(FloatingPointError, match=f"The {bad} of token 3 contains NaN"):
            sr.attention(
                q[:, :, :queries], given["key"], given["value"], name, return_state=True, **options
            )


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_an_empty_batch_with_a_state_has_gradients(order: int, decay: str) -> None:
    q, k, v = (torch.randn(0, 2, 6, 4, requires_grad=True) for _ in range(3))
    shapes = {"head": (2,), "token": (0, 2, 6), "channel": (0, 2, 6, 4)}
    log_decay = (-torch.rand(shapes[decay])).requires_grad_()
    spec = sr.AttentionSpec(series="taylor", order=order, decay=decay)  # type: ignore[arg-type]
    out, state = sr.attention(q, k, v, spec, log_decay=log_decay, return_state=True)
    (out.sum() + state.sums.sum()).backward()
    assert log_decay.grad is not None
    assert not log_decay.grad.any()


@pytest.mark.parametrize("tokens", [-1, 2.5, float("nan"), None, "7", True])
def test_tokens_that_are_no_number_of_tokens(tokens: Any) -> None:
    x = torch.randn(1, 1, 5, 4)
    _, state = sr.attention(x, x, x, "taylor:2", return_state=True)
    with pytest.raises(ValueError, match="A state's tokens must be"):
        dataclasses.replace(state, tokens=tokens)


def test_a_state_is_overwritten_by_its_like_alone() -> None:
    x = torch.randn(2, 1, 5, 4)
    _, state = sr.attention(x, x, x, "taylor:2", return_state=True)
    _, fewer = sr.attention(x[:1], x[:1], x[:1], "taylor:2", return_state=True)
    _, other = sr.attention(x, x, x, "taylor_norm:2", return_state=True)
    fixed = state.fixed()
    for wrong in (fewer, other):
        with pytest.raises(ValueError, match="its own spec and shapes"):
            fixed.update_(wrong)
    with pytest.raises(ValueError, match=r"make one with State.fixed\(\)"):
        state.update_(state)
    fixed.update_(state)
