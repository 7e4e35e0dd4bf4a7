"""Padding counts in no window: the visible tokens of a row are as if they were alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED, Shape, assert_close, make_case
from softmax_rnn.ops.layer.parts import ShortConvolution, last_inputs
from strategies import specs
from test_window import PER_TOKEN

NAMES = [name for name, spec in WIDENED.items() if spec.window is not None]
SPLITS = [(40,), (17, 1, 0, 22), (3, 30, 7)]
# Left, right and both sides; in between, as after a prompt padded on the right; almost everything.
SHOWN = {
    "left": [0] * 23 + [1] * 17,
    "right": [1] * 17 + [0] * 23,
    "between": [0] * 3 + [1] * 9 + [0] * 15 + [1] * 8 + [0] * 5,
    "every other": [0, 1] * 20,
    "one": [0] * 20 + [1] + [0] * 19,
    "all": [1] * 40,
}
PER_TOKEN_OR_GATE = (*PER_TOKEN, "input_gate", "output_gate")


def part(tensors: dict[str, Tensor], row: slice, tokens: Any) -> dict[str, Tensor]:
    """The inputs of some rows and tokens."""
    of_tokens = {key for key in PER_TOKEN_OR_GATE if key in tensors and tensors[key].ndim > 1}
    return {key: x[row, :, tokens] if key in of_tokens else x for key, x in tensors.items()}


@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_visible_tokens_are_as_if_alone(name: str, width: int | None) -> None:
    """In one call and by states, gradients included; without ``padding`` they are not."""
    spec = WIDENED[name]
    shape = Shape(len(SHOWN), queries=40, keys=40, outside_width=width)
    case, shown = make_case(spec, shape=shape), torch.tensor(list(SHOWN.values())).bool()
    inputs = {key: x.requires_grad_() for key, x in case.tensors.items()}
    mask, upstream = shown[:, None, None], case.upstream * shown[:, None, :, None]
    alone = torch.zeros_like(upstream)
    for row, tokens in enumerate(shown):
        one = slice(row, row + 1)
        found = sr.attention(spec=spec, **part(inputs, one, tokens), form="dense")
        alone[row, :, tokens] = found[0]
    by_row = torch.autograd.grad(alone, list(inputs.values()), upstream, materialize_grads=True)

    def by_states(split: tuple[int, ...]) -> Tensor:
        outs, state = [], None
        for start, stop in itertools.pairwise(itertools.accumulate(split, initial=0)):
            given = part(inputs, slice(None), slice(start, stop))
            given |= {"mask": mask[..., start:stop], "padding": True, "state": state}
            out, state = sr.attention(spec=spec, **given, return_state=True)
            outs.append(out)
        return torch.cat(outs, dim=2)

    computed = {form: sr.attention(spec=spec, **inputs, mask=mask, padding=True, form=form)
                for form in case.forms}  # fmt: skip
    if spec.outside == "series":
        computed |= {str(split): by_states(split) for split in SPLITS}
    for out in computed.values():
        grads = torch.autograd.grad(out, list(inputs.values()), upstream, materialize_grads=True)
        found = {"out": out.detach() * mask.mT, **dict(zip(inputs, grads, strict=True))}
        assert_close(
            found, {"out": alone.detach(), **dict(zip(inputs, by_row, strict=True))}, 1e-10
        )
    if (spec.window or 0) > 1:
        slots = sr.attention(spec=spec, **inputs, mask=mask, form="dense")
        assert not torch.allclose(slots * mask.mT, alone, rtol=1e-2)


def test_masks_of_pairs_are_no_padding() -> None:
    x, mask = torch.zeros(1, 1, 4, 2), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="With padding=True every query and head sees the same"):
        sr.attention(x, x, x, "window:2", mask=mask, padding=True)


@pytest.mark.slow
def test_compiled() -> None:
    """Without breaks of the graph."""
    case = make_case(WIDENED["window_taylor_first"], shape=Shape(2, queries=40, keys=40))
    mask = torch.tensor([SHOWN["between"], SHOWN["left"]]).bool()[:, None, None]
    case = dataclasses.replace(case, mask=mask)
    compiled = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
    found, expected = (case.run(x, padding=True) for x in (compiled, sr.attention))
    assert_close(found, expected, 1e-12)


def test_a_short_convolution_sees_no_padding() -> None:
    torch.manual_seed(0)
    convolution, shown = ShortConvolution(6, 4).double(), torch.tensor(list(SHOWN.values())).bool()
    torch.nn.init.normal_(convolution.kernel)
    x = torch.randn(len(shown), 40, 6, dtype=torch.float64)
    for split in SPLITS:
        outs, earlier = [], None
        for tokens, seen in zip(x.split(split, 1), shown.split(split, 1), strict=True):
            out, inputs = convolution(tokens, seen, earlier)
            earlier = last_inputs(inputs, seen, tokens.shape[1])
            outs.append(out)
        found = torch.cat(outs, 1)
        for row, tokens in enumerate(shown):
            expected, inputs = convolution(x[row : row + 1, tokens], None, None)
            torch.testing.assert_close(found[row, tokens], expected[0])
            torch.testing.assert_close(earlier[row], inputs[0, -3:])


@given(
    spec=specs().filter(lambda spec: spec.window is not None),
    shown=st.lists(st.booleans(), min_size=24, max_size=24).filter(any),
    width=st.none() | st.just(5),
)
def test_any_padding_of_any_window(
    spec: sr.AttentionSpec, shown: list[bool], width: int | None
) -> None:
    shape = Shape(1, 2, 1, 24, 24, width=4, value_width=3, outside_width=width)
    case, tokens = make_case(spec, shape=shape), torch.tensor(shown)
    given = {"mask": tokens[None, None, None], "padding": True}
    alone = part(case.tensors, slice(None), tokens)
    expected = sr.attention(spec=spec, **alone, form="dense")
    for form in ("dense", "auto"):
        found = sr.attention(spec=spec, **case.tensors, **given, form=form)[:, :, tokens]
        assert_close({"out": found}, {"out": expected}, 1e-7, form)
