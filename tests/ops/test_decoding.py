"""Decoding: one call for the usual attentions, with the results and errors of the general way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
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
    native_token._constants.cache_clear()
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
    # A sum with both signs may be within its rounding errors.
    assert sum(token is not None for token in taken) >= (8 if name in COVERED else 0)


@needs_library
def test_a_sum_that_cancels_takes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, spec = torch.Generator().manual_seed(0), sr.AttentionSpec(series="power", order=1)
    k, v = (normal(draw, 1, 1, 31, 2, dtype=torch.float32) for _ in range(2))
    _, state = sr.attention(k[:, :, :30], k[:, :, :30], v[:, :, :30], spec, return_state=True)
    total = state.sums[:, :, -1:] + k[:, :, 30:]
    across = torch.stack([total[..., 1], -total[..., 0]], dim=-1)  # so that the terms cancel
    arguments = across, k[:, :, 30:], v[:, :, 30:], spec
    assert native_token.step(*arguments, state, None) is None
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
    native_token._constants.cache_clear()

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
