"""Decoding: one call for the usual attentions, with the results and errors of the general way."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, library
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import softmax_rnn as sr
from quick import first_quick
from softmax_rnn.ops import attention as operation
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.cpu import token as native_token
from softmax_rnn.ops.forms.token import Weights
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.plan import planned

needs_library = pytest.mark.skipif(
    bool(cpp.missing()), reason="needs g++ and SOFTMAX_RNN_CPU_KERNEL other than 0"
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
SPECS = {
    **{name: sr.variant(name) for name in ("linear_elu", "linear_relu", "taylor:2", "taylor:3")},
    **{name: sr.variant(name) for name in ("power:2", "taylor:0")},
    "relu": sr.AttentionSpec(series="taylor", order=3, feature_map="relu"),
    "signed": sr.AttentionSpec(series="polynomial", coefficients=(0.3, -0.5, 0.0, 0.2)),
    "token": sr.AttentionSpec(series="taylor", order=2, decay="token"),
    "head": sr.AttentionSpec(series="taylor", order=2, decay="head", scale=-0.5),
}

COVERED = SPECS.keys() - {"linear_relu", "taylor:3"}  # whose denominators have an offset or floor


@needs_library
def test_constants_are_of_the_cpu_whatever_the_default_device_is() -> None:
    """C++ would read addresses of another device."""
    spec = sr.AttentionSpec(series="power", order=3)
    q, k, v = torch.randn(3, 1, 2, 9, 5).unbind(0)
    _, state = sr.attention(q, k, v, spec, return_state=True)
    one = [x[:, :, :1] for x in (q, k, v)]
    native_token._alike.cache_clear()
    with torch.device("meta"):
        found, _ = sr.attention(*one, spec, state=state, return_state=True)
    expected, _ = sr.attention(*one, spec, state=state, return_state=True, form="recurrent")
    torch.testing.assert_close(found, expected)


def normal(draw: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)


def general(patch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Any:
    with patch.context() as inner:
        inner.setattr(operation, "_SHORT", {})
        return sr.attention(*args, **options)


@needs_library
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SPECS)
def test_a_token_after_a_state(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths, groups, batches and layouts; the result and the state of the general way."""
    pick, draw, spec = random.Random(name), torch.Generator().manual_seed(0), SPECS[name]
    taken = []
    step = native_token.step
    monkeypatch.setattr(native_token, "step", lambda *x: taken.append(step(*x)) or taken[-1])
    for _ in range(10):
        batch, heads, groups = pick.choice([1, 3]), pick.choice([1, 2]), pick.choice([1, 2])
        width, values = pick.choice([1, 4, 17]), pick.choice([1, 6])
        shape, scale = (batch, 30, heads, width), pick.choice([1e-3, 1.0, 10.0])
        k = normal(draw, *shape, dtype=dtype).transpose(1, 2) * scale
        v = normal(draw, batch, heads, 30, values, dtype=dtype)
        q = normal(draw, batch, heads * groups, 30, width, dtype=dtype)
        options: dict[str, Any] = {"return_state": True}
        state, decay = None, {}
        for here in (slice(0, 29), slice(29, 30)):
            piece = [x[:, :, here] for x in (q, k, v)]
            if spec.decay != "none":
                rates = normal(draw, batch, heads, piece[0].shape[2]).square()
                decay = {"log_decay": -rates if spec.decay == "token" else -rates[0, :, 0]}
            if state is None:
                state = sr.attention(*piece, spec, **options, **decay)[1]
        found = sr.attention(*piece, spec, state=state, **options, **decay)
        expected = general(monkeypatch, *piece, spec, state=state, **options, **decay)
        for a, b in ((found[0], expected[0]), (found[1].sums, expected[1].sums)):
            assert a.dtype == b.dtype
            assert (a - b).norm() <= TOLERANCE[dtype] * b.norm().clamp(min=1e-30), options
        assert (found[1].tokens, found[1].visible.tolist()) == (30, [30] * batch)
        for key in ("magnitudes", "largest"):
            a, b = (each[1].tensors.get(key) for each in (found, expected))
            torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=0.0, msg=key)
    # A sum with both signs may be within its rounding errors.
    assert sum(token is not None for token in taken) >= (8 if name in COVERED else 0)


WINDOWED = {
    "series": st.sampled_from(["power", "taylor", "polynomial"]),
    "order": st.integers(0, 3),
    "window": st.integers(1, 6),
    "global_keys": st.integers(0, 4),
    "outside_width": st.sampled_from([None, 3, 7]),
    "hidden": st.integers(0, 9),
    "spread": st.sampled_from([1.0, 1e-3, 6.0]),
    "batch": st.integers(1, 2),
    "dtype": st.sampled_from([torch.float64, torch.float32]),
    "seed": st.integers(0, 999),
}


@needs_library
@given(**WINDOWED)
def test_tokens_after_a_window_and_a_state(
    series: Any,
    order: int,
    window: int,
    global_keys: int,
    outside_width: int | None,
    hidden: int,
    spread: float,
    batch: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Token by token as in one pass, also after padding; outputs and every tensor of the state."""
    fixed = tuple(1.0 / (n + 1) for n in range(order + 1)) if series == "polynomial" else None
    spec = sr.AttentionSpec(
        series=series, order=None if fixed else order, coefficients=fixed,
        window=window, global_keys=global_keys, outside="series",
    )  # fmt: skip
    draw, tokens = torch.Generator().manual_seed(seed), 14
    sizes = {"q": (4, 5), "k": (2, 5), "v": (2, 6)}
    if outside_width is not None:
        sizes |= {"outside_q": (4, outside_width), "outside_k": (2, outside_width)}
    given = {
        name: normal(draw, batch, heads, tokens, width) for name, (heads, width) in sizes.items()
    }
    for name in sizes.keys() - {"v"}:
        given[name] *= spread
    if outside_width is not None:  # weights of any sign could cancel, to nothing
        given = {name: x.abs() if "outside" in name else x for name, x in given.items()}
    else:
        given |= {"q": given["q"].abs(), "k": given["k"].abs()}
    scale = normal(draw, 4).exp()
    shown = torch.ones(batch, 1, 1, tokens, dtype=torch.bool)
    shown[-1, ..., : min(hidden, tokens - 3)] = False  # of the last row
    given = {name: x.to(dtype) for name, x in given.items()}
    calls, original = [], native_token.step

    def counted(call: Call) -> Any:
        calls.append(original(call))
        return calls[-1]

    def run(tensors: dict[str, Tensor], short: bool) -> tuple[Tensor, sr.State]:
        first = {name: x[:, :, :11] for name, x in tensors.items()}
        options: dict[str, Any] = {"outside_scale": scale.to(tensors["q"].dtype)}
        out, state = sr.attention(
            **first, spec=spec, mask=shown[..., :11], padding=True, return_state=True, **options
        )
        outputs = [out]
        for token in range(11, tokens):
            one = {name: x[:, :, token : token + 1] for name, x in tensors.items()}
            options |= {} if short else {"mask": shown[..., token : token + 1], "padding": True}
            out, state = sr.attention(**one, spec=spec, state=state, return_state=True, **options)
            outputs.append(out)
        return torch.cat(outputs, dim=2), state

    expected, after = run({name: x.double() for name, x in given.items()}, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_token, "step", counted)
        found, state = run(given, True)
    assert len(calls) == 3
    assert None not in calls
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert state.tensors.keys() == after.tensors.keys()
    for name, x in state.tensors.items():
        wanted = after.tensors[name]
        size = float(wanted.double().abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(
            x.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance * size, msg=name
        )


@needs_library
def test_a_window_that_is_not_certain_takes_the_general_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hidden slots between visible ones, sums that cancel, the series alone, NaN."""
    spec = sr.AttentionSpec(series="power", order=1, window=4, global_keys=1, outside="series")
    q, k, v = (normal(torch.Generator().manual_seed(i), 1, 2, 12, 4) for i in range(3))
    shown = torch.ones(1, 1, 1, 11, dtype=torch.bool)
    shown[..., 9] = False
    for change in ("gap", "alone", "nan", "cancel"):
        mask = shown if change == "gap" else None
        early = [x[:, :, :11] for x in (q, k, v)]
        one = [x[:, :, 11:].clone() for x in (q, k, v)]
        if change == "cancel":
            early[1] = early[1].sign() * 1e8
            one[0] = -1e8 * torch.ones_like(one[0])
        _, state = sr.attention(*early, spec, mask=mask, return_state=True)
        options: dict[str, Any] = {"state": state, "return_state": True}
        if change == "alone":
            options["outside_scale"] = torch.full((2,), torch.inf, dtype=q.dtype)
        if change == "nan":
            one[2][..., 0] = torch.nan
        results = [
            call(*one, spec, **options)[0]
            for call in (sr.attention, lambda *a, **o: general(monkeypatch, *a, **o))
        ]
        torch.testing.assert_close(*results, equal_nan=True, rtol=1e-9, atol=1e-9)


@needs_library
def test_kept_keys_of_a_narrower_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt in bfloat16, before a token in float32: C++ reads one type."""
    spec = sr.AttentionSpec(series="taylor", order=2, window=8, global_keys=1, outside="series")
    x = normal(torch.Generator().manual_seed(0), 1, 2, 13, 16, dtype=torch.float32)
    early, one = x[:, :, :12].bfloat16(), x[:, :, 12:]
    _, state = sr.attention(early, early, early, spec, return_state=True)
    options: dict[str, Any] = {"state": state, "return_state": True}
    found, after = sr.attention(one, one, one, spec, **options)
    expected, wanted = general(monkeypatch, one, one, one, spec, **options)
    torch.testing.assert_close(found, expected)
    for name, tensor in after.tensors.items():
        torch.testing.assert_close(tensor, wanted.tensors[name], check_dtype=False)


@pytest.mark.parametrize("part", ["recent", "first"])
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("k", lambda x: x[:, :1]),
        ("k", lambda x: x[:, :, :0]),
        ("v", lambda x: x[..., :2]),
        ("v", lambda x: x[:, :1]),
        ("k", lambda x: x[..., :1]),
        ("visible", lambda x: x[:0]),
        ("visible", lambda x: x.long()),
        ("visible", lambda x: x.to("meta")),
        ("v", lambda x: None),
    ],
)
def test_damaged_keys_of_a_state_are_named(part: str, field: str, change: Any) -> None:
    spec = sr.AttentionSpec(series="power", order=1, window=3, global_keys=2, outside="series")
    x = torch.randn(1, 2, 9, 4)
    _, state = sr.attention(x, x, x, spec, return_state=True)
    kept = getattr(state, part)
    damaged = kept._replace(**{field: change(getattr(kept, field))})
    state = dataclasses.replace(state, **{part: damaged})
    one = x[:, :, :1]
    with pytest.raises(ValueError, match=rf"state('s {part}\.{field}| must hold)"):
        sr.attention(one, one, one, spec, state=state, return_state=True)


@pytest.mark.parametrize("name", ["outside_scale", "outside_q", "outside_k", "recent"])
def test_gradients_of_what_only_a_window_has(name: str) -> None:
    spec = sr.AttentionSpec(series="power", order=1, window=3, outside="series")
    x = normal(torch.Generator().manual_seed(0), 1, 2, 9, 4)
    early, one = x[:, :, :8], x[:, :, 8:]
    extras = {"outside_q": x.abs(), "outside_k": x.abs()}
    values = early.clone()
    if name == "recent":  # the last three alone are inside the window
        values = torch.cat((values[:, :, :5], values[:, :, 5:].requires_grad_()), dim=2)
    before = {key: y[:, :, :8] for key, y in extras.items()}
    _, state = sr.attention(early, early, values, spec, return_state=True, **before)
    given = {key: y[:, :, 8:].clone() for key, y in extras.items()}
    given["outside_scale"] = torch.ones(2, dtype=x.dtype)
    if name in given:
        given[name].requires_grad_()
    out, _ = sr.attention(one, one, one, spec, state=state, return_state=True, **given)
    assert out.requires_grad


def test_a_negative_factor_is_an_error() -> None:
    spec = sr.variant("window_taylor:2")
    x = torch.randn(1, 2, 90, 4)
    scale = torch.tensor([1.0, -0.5])
    _, state = sr.attention(x, x, x, spec, return_state=True)
    one = x[:, :, :1]
    with pytest.raises(ValueError, match=r"outside_scale must be 0 or more; the smallest is -0.5"):
        sr.attention(x, x, x, spec, outside_scale=scale)
    with pytest.raises(ValueError, match="outside_scale must be 0 or more"):
        sr.attention(one, one, one, spec, outside_scale=scale, state=state, return_state=True)


@needs_library
def test_a_sum_that_cancels_takes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, spec = torch.Generator().manual_seed(0), sr.AttentionSpec(series="power", order=1)
    k, v = (normal(draw, 1, 1, 31, 2, dtype=torch.float32) for _ in range(2))
    _, state = sr.attention(k[:, :, :30], k[:, :, :30], v[:, :, :30], spec, return_state=True)
    total = state.sums[:, :, -1:] + k[:, :, 30:]
    across = torch.stack([total[..., 1], -total[..., 0]], dim=-1)  # so that the terms cancel
    arguments = across, k[:, :, 30:], v[:, :, 30:], spec
    assert native_token.step(Call(*arguments, state=state, return_state=True)) is None
    found = sr.attention(*arguments, state=state, return_state=True)
    expected = general(monkeypatch, *arguments, state=state, return_state=True)
    assert torch.equal(found[0], expected[0])


@needs_library
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"k": 1e25}, OverflowError),
        ({"v": float("inf")}, FloatingPointError),
        ({"k": float("nan")}, FloatingPointError),
        ({"q": float("nan")}, None),
    ],
)
def test_errors_are_those_of_the_general_way(
    change: dict[str, float], error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    given = {name: normal(draw, 1, 2, 1, 4, dtype=torch.float32) for name in "qkv"}
    _, state = sr.attention(*given.values(), "taylor:2", return_state=True)
    for name, value in change.items():
        given[name][0, 1, 0, 2] = value
    for compute in (sr.attention, lambda *x, **y: general(monkeypatch, *x, **y)):
        arguments: dict[str, Any] = {"state": state, "return_state": True}
        if error is None:
            out = compute(*given.values(), "taylor:2", **arguments)[0]
            assert out.isnan().any()
        else:
            with pytest.raises(error):
                compute(*given.values(), "taylor:2", **arguments)


@needs_library
@pytest.mark.parametrize("name", first_quick(["taylor:2", "signed", "token", "head", "relu"]))
def test_a_compiled_graph_calls_an_operator(name: str) -> None:
    """The same result, and the errors that compiled operations would not raise."""
    draw, spec = torch.Generator().manual_seed(0), SPECS[name]
    q, k, v = (normal(draw, 2, heads, 1, 4) for heads in (4, 2, 2))
    decay = {"token": {"log_decay": -torch.rand(2, 2, 1)}, "head": {"log_decay": -torch.rand(2)}}
    options: dict[str, Any] = {"return_state": True, **decay.get(name, {})}
    _, state = sr.attention(q, k, v, spec, **options)
    torch.compiler.reset()  # only so many graphs of a function are kept
    compiled = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
    given = [x.clone() for x in (q, k, v)]
    found = compiled(*given, spec, state=state, **options)
    expected = sr.attention(*given, spec, state=state, **options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].sums, expected[1].sums)
    assert (found[1].tokens, found[1].visible.tolist()) == (2, [2, 2])
    given[1][0, 1, 0, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="The key of token 1 contains NaN"):
        compiled(*given, spec, state=state, **options)


@needs_library
def test_the_operator() -> None:
    draw, spec = torch.Generator().manual_seed(0), sr.variant("taylor:2")
    q, k, v = (normal(draw, 2, heads, 1, 4) for heads in (4, 2, 2))
    _, state = sr.attention(q, k, v, spec, return_state=True)
    given = q, k, v, [*state.tensors.values()], None, torch.tensor(1)
    arguments = *given, *Weights.of(spec, 4)
    library.opcheck(torch.ops.softmax_rnn.token, arguments)


@needs_library
def test_gradients_take_the_general_way() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (normal(draw, 1, 2, 1, 4) for _ in range(3))
    _, state = sr.attention(q, k, v, "taylor:2", return_state=True)
    k.requires_grad_()
    out, after = sr.attention(q, k, v, "taylor:2", state=state, return_state=True)
    assert torch.autograd.grad(out.sum() + after.sums.sum(), k)[0].abs().sum() > 0
    # Of the decay alone: no other input has a gradient.
    decay = (-torch.rand(1, 2, 1)).requires_grad_()
    given = q, k.detach(), v, SPECS["token"]
    with torch.no_grad():
        _, state = sr.attention(*given, log_decay=decay, return_state=True)
    out, _ = sr.attention(*given, log_decay=decay, state=state, return_state=True)
    assert torch.autograd.grad(out.sum(), decay)[0].abs().sum() > 0


def test_one_query_of_a_new_spec_is_one_graph() -> None:
    draw, spec = torch.Generator().manual_seed(0), sr.AttentionSpec(scale=0.37)
    q, k, v = (normal(draw, 1, 2, length, 4) for length in (1, 9, 9))
    torch.compiler.reset()
    compiled = torch.compile(sr.attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, spec), sr.attention(q, k, v, spec))


@needs_library
def test_other_derivatives_are_errors_and_leave_nothing_behind() -> None:
    draw, spec = torch.Generator().manual_seed(0), sr.AttentionSpec(series="taylor", order=2)
    inputs = tuple(normal(draw, 1, 2, 1, 5) for _ in range(3))
    _, state = sr.attention(*inputs, spec, return_state=True)
    native_token._alike.cache_clear()

    def out(*given: Tensor) -> Tensor:
        return sr.attention(*given, spec, state=state, return_state=True)[0]

    for place in range(3):
        with pytest.raises(NotImplementedError, match="a state was given inside a transform"):
            torch.func.jvp(
                lambda x, at=place: out(*inputs[:at], x, *inputs[at + 1 :]),
                (inputs[place],),
                (inputs[place],),
            )
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs[place], inputs[place])
            given = *inputs[:place], dual, *inputs[place + 1 :]
            with pytest.raises(NotImplementedError):
                out(*given)
            for grad in (True, False):
                with (
                    torch.set_grad_enabled(grad),
                    pytest.raises(NotImplementedError, match="Forward-mode derivative"),
                ):
                    sr.attention(*given, "softmax")
    torch.func.jvp(lambda x: x + out(*inputs), (inputs[0],), (inputs[0],))
    assert out(*inputs).isfinite().all()


@needs_library
def test_signs_and_other_default_devices() -> None:
    """A lazily negated tensor, and tensors made inside must be on the inputs' device."""
    draw, spec = torch.Generator().manual_seed(0), sr.variant("linear_elu")
    q, k, v = (normal(draw, 1, 2, 1, 4) for _ in range(3))
    _, state = sr.attention(q, k, v, spec, return_state=True)
    options: dict[str, Any] = {"state": state, "return_state": True}
    expected = sr.attention(-q, -k, -v, spec, **options)[0]
    with torch.device("meta"):
        found = sr.attention(*(torch._neg_view(x) for x in (q, k, v)), spec, **options)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "norm", "gate"])
def test_a_query_over_keys(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, spec = torch.Generator().manual_seed(0), sr.variant(name)
    q = normal(draw, 2, 4, 1, 8, dtype=dtype)
    k, v = (normal(draw, 2, 37, 2, 8, dtype=dtype).transpose(1, 2) for _ in range(2))
    gate = {"output_gate": torch.rand(2, 4, 1).to(dtype)} if name == "gate" else {}
    with torch.inference_mode():
        found = sr.attention(q, k, v, spec, **gate)
    expected = sr.attention(*(x.double() for x in (q, k, v)), spec, form="dense", **gate)
    assert found.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert (found.double() - expected).norm() <= tolerance * expected.norm()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which does not change the precision
        assert torch.equal(sr.attention(q, k, v, spec, **gate), found)
    alone = planned(Call(q, k, v, spec, output_gate=gate.get("output_gate"))).path == "kernel"
    assert alone == (name == "softmax")


@needs_library
def test_other_tracers_see_what_is_computed() -> None:
    """They record operations, of which the one call in C++ is none."""
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
    _, state = sr.attention(q, k, v, "taylor:2", return_state=True)

    def token(*given: Tensor) -> Tensor:
        return sr.attention(*given, "taylor:2", state=state, return_state=True)[0]

    first, second = torch.randn(2, 3, 1, 2, 1, 4).unbind(0)
    expected = token(*second)
    for record in (
        lambda: torch.jit.trace(token, tuple(first), check_trace=False),
        lambda: make_fx(token)(*first),
    ):
        torch.testing.assert_close(record()(*second), expected)


@needs_library
def test_a_compiled_token_of_a_layer_with_a_convolution() -> None:
    """Its state has more tensors than the operation's; a sum of zero takes the general way."""
    spec = sr.AttentionSpec(series="power", order=1, feature_map="relu")
    torch.manual_seed(0)
    layer = sr.Attention(4, 4, spec, options={"short_convolution": 3, "rotary": False})
    x = torch.randn(1, 9, 4)

    def step(x: Tensor, state: sr.State) -> tuple[Tensor, sr.State]:
        found: tuple[Tensor, sr.State] = layer(x, state=state, return_state=True)
        return found

    torch.compiler.reset()
    compiled = torch.compile(step, backend="eager")
    with torch.no_grad():
        _, state = layer(x[:, :6], return_state=True)
        ours, theirs = step(x[:, 6:7], state), compiled(x[:, 6:7], state)
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].tensors, theirs[1].tensors)
