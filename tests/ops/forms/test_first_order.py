"""Derivatives beyond the first, and of checkpointed calls: right, or an error that says so."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import softmax_rnn as sr
from cases import VARIANTS, Case, Shape, make_case

SMALL = Shape(batch=1, heads=2, kv_heads=1, queries=9, keys=9, width=4, value_width=4)
HAND_WRITTEN = [
    (name, form)
    for name in ("softmax", "norm", "softmax_plus_one", "gate", "taylor:2", "linear_elu", "power:3")
    for form in sr.forms(name)
    if form != "dense"
]


def attend(case: Case, form: str) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    return sr.attention(spec=case.spec, form=form, **inputs), inputs


@pytest.mark.parametrize(("name", "form"), HAND_WRITTEN)
def test_a_second_derivative_is_an_error(name: str, form: str) -> None:
    """However small its part of the graph, and whatever the gradient of the output depends on."""
    out, inputs = attend(make_case(sr.variant(name), shape=SMALL), form)
    for loss in (out.sum(), out.square().sum()):
        q, k, v = (inputs[x] for x in "qkv")
        grads = torch.autograd.grad(loss, (q, k, v), create_graph=True)
        for grad in grads:
            for x in (q, k, v):
                with pytest.raises(NotImplementedError, match="Second derivative: .*form='dense'"):
                    torch.autograd.grad(grad.sum(), x, retain_graph=True, allow_unused=True)


def test_a_second_derivative_through_a_state_is_an_error() -> None:
    case = make_case(sr.variant("taylor:2"), shape=SMALL)
    q, k, v = (case.tensors[name].clone().requires_grad_() for name in "qkv")
    for form in ("chunked", "recurrent"):
        _, state = sr.attention(q, k, v, case.spec, return_state=True, form=form)
        out = sr.attention(q.detach(), k.detach(), v.detach(), case.spec, state=state, form=form)
        (grad,) = torch.autograd.grad(out.sum(), k, create_graph=True)
        with pytest.raises(NotImplementedError, match="form='dense'"):
            torch.autograd.grad(grad.sum(), k)


@pytest.mark.parametrize(("name", "form"), HAND_WRITTEN)
def test_forward_mode_is_an_error(name: str, form: str) -> None:
    case = make_case(sr.variant(name), shape=SMALL)
    extras = {key: x for key, x in case.tensors.items() if key not in "qkv"}
    for moved in "qkv":
        with forward_ad.dual_level():
            x = {key: case.tensors[key] for key in "qkv"}
            x[moved] = forward_ad.make_dual(x[moved], torch.ones_like(x[moved]))
            with pytest.raises(NotImplementedError, match="Forward-mode deriv.*form='dense'"):
                sr.attention(spec=case.spec, form=form, **x, **extras)


TRANSFORMED = {
    **{name: sr.variant(name) for name in VARIANTS},
    "token": sr.AttentionSpec(series="taylor", order=2, decay="token"),
    "channel": sr.AttentionSpec(series="taylor", order=2, decay="channel"),
    "exp_token": sr.AttentionSpec(decay="token"),
    "window": sr.AttentionSpec(series="taylor", order=2, window=4),
    "both": sr.AttentionSpec(series="taylor", order=2, window=4, outside="series"),
    "powers": sr.variant("power:4"),
}


@pytest.mark.parametrize("length", [9, 260])  # short, and long enough for the native loops
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name: str, length: int) -> None:
    """torch.vmap of outputs and of gradients are those of each input alone."""
    shape = Shape(batch=1, heads=2, kv_heads=1, queries=length, keys=length, width=4, value_width=4)
    cases = [make_case(TRANSFORMED[name], seed=seed, shape=shape) for seed in range(2)]
    names = [key for key in cases[0].tensors if cases[0].tensors[key].is_floating_point()]

    def out(*given: Tensor) -> Tensor:
        return sr.attention(spec=TRANSFORMED[name], **dict(zip(names, given, strict=True)))

    def loss(*given: Tensor) -> Tensor:
        return out(*given).square().sum()

    each = [[case.tensors[key] for key in names] for case in cases]
    together = [torch.stack(x) for x in zip(*each, strict=True)]
    places = tuple(range(len(names)))
    found = torch.vmap(out)(*together), torch.vmap(torch.func.grad(loss, places))(*together)
    for i, given in enumerate(each):
        leaves = [x.clone().requires_grad_() for x in given]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        torch.testing.assert_close(found[0][i], out(*given))
        torch.testing.assert_close([x[i] for x in found[1]], list(expected))


def test_transforms_of_other_forms_are_errors() -> None:
    q = torch.randn(2, 1, 2, 9, 4)
    for form in ("native", "blocked", "chunked", "recurrent"):
        with pytest.raises(NotImplementedError, match=f"form='{form}' was given inside a transf"):
            torch.vmap(lambda x, form=form: sr.attention(x, x, x, "taylor:2", form=form))(q)
    with pytest.raises(NotImplementedError, match="a state was given inside a transform"):
        torch.vmap(lambda x: sr.attention(x, x, x, "taylor:2", return_state=True)[0])(q)
    given = q[0], q[0], q[0]
    with pytest.raises(NotImplementedError, match="form='blocked' was given inside a transform"):
        torch.vmap(lambda x: sr.attention(*given, "polynomial:3", coefficients=x, form="blocked"))(
            torch.rand(3, 2, 4)
        )
    with pytest.raises(NotImplementedError, match="form='native' was given inside a transform"):
        torch.vmap(lambda x: sr.attention(*given, "linear_elu", mask=x, form="native"))(
            torch.rand(3, 9) > 0.3
        )
    _, state = sr.attention(*given, "taylor:2", return_state=True)
    with pytest.raises(NotImplementedError, match="a state was given inside a transform"):
        torch.func.grad(
            lambda x: sr.attention(
                *given, "taylor:2", state=dataclasses.replace(state, sums=x)
            ).sum()
        )(state.sums)
    decays = -torch.rand(3, 1, 2, 9)
    found = torch.vmap(lambda x: sr.attention(*given, "softmax+decay", log_decay=x))(decays)
    expected = [sr.attention(*given, "softmax+decay", log_decay=x) for x in decays]
    torch.testing.assert_close(found, torch.stack(expected))
    tangent = torch.func.jvp(lambda x: sr.attention(x, x, x, "softmax"), (q[0],), (q[0],))[1]
    assert tangent.isfinite().all()
    # Constants of a transform may be computed by a form with a state, with one or without.
    torch.vmap(lambda x: x * sr.attention(q[0], q[0], q[0], "taylor:2", form="chunked"))(q)


TRANSFORMS = {
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x]))[0],
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[1],
}
# Each tensor of a call: the only one that a transform is about.
ABOUT = {
    "q": sr.AttentionSpec(),
    "output_gate": sr.AttentionSpec(output_gate="after_norm"),
    "input_gate": sr.AttentionSpec(series="taylor", order=2, input_gate=True),
    "norm": sr.AttentionSpec(denominator="none", norm="rms"),
    "outside_q": sr.AttentionSpec(series="taylor", order=2, window=3, outside="series"),
    "outside_scale": sr.AttentionSpec(series="taylor", order=2, window=3, outside="series"),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ABOUT)
def test_a_transform_of_one_tensor_is_right_or_told(name: str, transform: str) -> None:
    spec, (q, k, v) = ABOUT[name], torch.rand(3, 1, 2, 6, 4).unbind(0)
    given = {"q": q, "k": k, "v": v}
    if spec.output_gate != "none" or spec.input_gate:
        given[name] = torch.rand(1, 2, 6)
    if name.startswith("outside"):
        given[name] = torch.rand(1, 2, 6, 4) if name == "outside_q" else torch.rand(2)
    place = name if name in given else "q"

    def found(**options: Any) -> Tensor:
        def call(x: Tensor) -> Tensor:
            return sr.attention(spec=spec, **{**given, place: x}, **options)

        return TRANSFORMS[transform](call, given[place])

    expected = found(form="dense")
    for form in ("auto", *sr.forms(spec)):
        refused = suppress(NotImplementedError) if form != "auto" else nullcontext()
        with refused:
            torch.testing.assert_close(found(form=form), expected)
    if spec.has_state and name != "outside_scale":  # which no part of a state depends on
        with pytest.raises(NotImplementedError, match="a state was given inside a transform"):
            TRANSFORMS[transform](
                lambda x: sr.attention(spec=spec, **{**given, place: x}, return_state=True)[0],
                given[place],
            )


@pytest.mark.parametrize("name", [name for name in VARIANTS if "detached" not in name])
def test_dense_has_every_derivative(name: str) -> None:
    shape = Shape(batch=1, heads=1, kv_heads=1, queries=3, keys=4, width=2, value_width=3)
    case = make_case(sr.variant(name), shape=shape)
    inputs = [x.requires_grad_() for x in case.tensors.values()]

    def attend(*given: Tensor) -> Tensor:
        return sr.attention(
            spec=case.spec, form="dense", **dict(zip(case.tensors, given, strict=True))
        )

    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, inputs)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("name", VARIANTS)
def test_checkpoints(name: str, reentrant: bool) -> None:
    """A checkpointed call gives the gradients of a plain one, to the bit."""
    case = make_case(sr.variant(name), mask="padding", shape=SMALL)
    kept = partial(checkpoint, use_reentrant=reentrant)
    for form in case.forms:

        def attend(*given: Tensor, form: str = form) -> Tensor:
            named = dict(zip(case.tensors, given, strict=True))
            return sr.attention(spec=case.spec, mask=case.mask, form=form, **named)

        grads = []
        for call in (attend, partial(kept, attend)):
            inputs = [x.clone().requires_grad_() for x in case.tensors.values()]
            call(*inputs).backward(case.upstream)
            grads.append([x.grad for x in inputs])
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None), form
            assert a is None or torch.equal(a, b), form
