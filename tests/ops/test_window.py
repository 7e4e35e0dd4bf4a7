"""A window and a series under one denominator: its state, at any split of the sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close, make_case

NAMES = [name for name, spec in WIDENED.items() if spec.outside == "series"]
SPLITS = [(40,), (1,) * 40, (17, 1, 22), (3, 30, 7)]


def drawn(name: str, mask: str = "none") -> Case:
    return make_case(WIDENED[name], mask=mask, shape=Shape(queries=40, keys=40))


def pieces(case: Case, start: int, stop: int) -> dict[str, Any]:
    """The inputs of some positions."""
    found: dict[str, Tensor] = {}
    for key, x in case.tensors.items():
        per_token = key in ("q", "k", "v") or (key == "log_decay" and x.ndim > 1)
        found[key] = x[:, :, start:stop] if per_token else x
    if case.mask is not None:
        found["mask"] = case.mask[..., start:stop]
    return found


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_at_any_split(name: str, mask: str, split: tuple[int, ...]) -> None:
    case = drawn(name, mask)
    expected = case.run(sr.attention, form="dense")
    inputs = {key: x.clone().requires_grad_() for key, x in case.tensors.items()}
    tracked = dataclasses.replace(case, tensors=inputs)
    outs, state, start = [], None, 0
    for length in split:
        out, state = sr.attention(
            spec=case.spec, state=state, return_state=True, **pieces(tracked, start, start + length)
        )
        outs.append(out)
        start += length
    out = torch.cat(outs, dim=2)
    grads = torch.autograd.grad(out, list(inputs.values()), case.upstream)
    assert_close({"out": out.detach(), **dict(zip(inputs, grads, strict=True))}, expected, 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_keeps_its_size(name: str) -> None:
    case = drawn(name)
    sizes = set()
    state = None
    for start in range(0, 40, 4):
        _, state = sr.attention(
            spec=case.spec, state=state, return_state=True, **pieces(case, start, start + 4)
        )
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    assert state is not None
    assert state.tokens == 40


@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("denominator", ["sum", "none"])
def test_small_weights_in_the_window_of_the_first_rows(denominator: Any, decay: Any) -> None:
    """Where no key is outside, or all have faded, exp(-300) is a weight as any other."""
    spec = sr.AttentionSpec(
        **{"series": "taylor", "order": 2, "window": 4, "outside": "series"},
        **{"denominator": denominator, "norm": "l2", "decay": decay},
    )
    case = make_case(spec, shape=Shape(queries=9, keys=9), decay=1e-3)
    for name, sign in (("q", 1.0), ("k", -1.0)):
        case.tensors[name].fill_(sign * (300 * 8**-0.5) ** 0.5)
    if decay == "token":
        case.tensors["log_decay"][:, :, 4] = -1e4  # all earlier keys have faded
    expected = case.run(sr.attention, form="dense")
    seen = slice(8) if decay == "token" else slice(4)
    assert expected["out"][:, :, seen].norm(dim=-1).min() > 0.99
    for form in case.forms:
        found = case.run(sr.attention, torch.float32, form=form)
        torch.testing.assert_close(
            found["out"].double(), expected["out"], atol=1e-4, rtol=1e-4, msg=form
        )
        assert all(x.isfinite().all() for x in found.values())


def test_a_state_of_another_window_is_refused() -> None:
    case = drawn("window_taylor")
    _, state = sr.attention(spec=case.spec, return_state=True, **pieces(case, 0, 20))
    cut = dataclasses.replace(state, recent=None)
    with pytest.raises(ValueError, match="must hold 6 recent keys, not 0"):
        sr.attention(spec=case.spec, state=cut, **pieces(case, 20, 40))
