"""``Stream``: pieces of any length give what the whole sequence gives."""

from __future__ import annotations

import pytest
import torch

import softmax_rnn as sr
from cases import WIDENED, Shape, make_case


@pytest.mark.parametrize("name", ["taylor:3", "linear_cosine", "quadratic"])
@pytest.mark.parametrize("sizes", [[1] * 40, [7, 1, 0, 20, 12], [40]], ids=["one", "cut", "whole"])
def test_pieces_are_the_whole(name: str, sizes: list[int]) -> None:
    family, _, order = name.partition(":")
    spec = sr.variant(family, order=int(order)) if order else sr.variant(name)
    case = make_case(spec, mask="padding", shape=Shape(queries=40, keys=40))
    extras = {key: x for key, x in case.tensors.items() if key not in ("q", "k", "v")}
    q, k, v = (case.tensors[key] for key in "qkv")
    expected = sr.attention(q, k, v, spec, mask=case.mask, form="dense", **extras)
    stream, start, outs = sr.Stream(spec, **extras), 0, []
    for size in sizes:
        here = slice(start, start + size)
        pieces = (x[:, :, here] for x in (q, k, v))
        outs.append(stream(*pieces, mask=case.mask[..., here]))
        start += size
    torch.testing.assert_close(torch.cat(outs, dim=2), expected)
    assert stream.tokens == 40


def test_gates_come_with_their_tokens_and_nothing_else_is_held() -> None:
    spec = sr.AttentionSpec(
        series="taylor", order=2, input_gate=True, output_gate="after_norm", norm="rms"
    )
    case = make_case(spec, shape=Shape(queries=30, keys=30))
    expected = case.run(sr.attention, form="dense")["out"]
    x = {key: value.requires_grad_() for key, value in case.tensors.items()}
    stream, outs, sizes = sr.Stream(spec, norm_weight=x["norm_weight"]), [], []
    for here in (slice(0, 11), slice(11, 30)):
        outs.append(
            stream(
                *(x[key][:, :, here] for key in "qkv"),
                input_gate=x["input_gate"][..., here],
                output_gate=x["output_gate"][..., here],
            )
        )
        sizes.append(stream.nbytes)
    torch.testing.assert_close(torch.cat(outs, dim=2), expected)
    assert sizes[0] == sizes[1] > 0
    assert not stream.state.sums.requires_grad


@pytest.mark.parametrize(
    ("name", "width"),
    [
        (name, width)
        for name, spec in WIDENED.items()
        for width in (None, 5)[: 2 if spec.outside == "series" else 1]
        if spec.has_state
    ],
)
def test_decays_come_with_their_tokens(name: str, width: int | None) -> None:
    """And queries and keys outside the window, of a width of their own."""
    spec = WIDENED[name]
    case = make_case(spec, mask="padding", shape=Shape(queries=40, keys=40, outside_width=width))
    expected = case.run(sr.attention, form="dense")["out"]
    given = dict(case.tensors)
    tokens, decay = [given.pop(key) for key in "qkv"], given.pop("log_decay", None)
    outside = {key: given.pop(key) for key in ("outside_q", "outside_k") if key in given}
    stream, outs = sr.Stream(spec, **given), []
    for here in (slice(0, 11), slice(11, 12), slice(12, 12), slice(12, 40)):
        per_token = decay is not None and decay.ndim > 1
        own = decay[:, :, here] if per_token else decay
        mask = case.mask[..., here]
        others = {key: x[:, :, here] for key, x in outside.items()}
        outs.append(stream(*(x[:, :, here] for x in tokens), mask=mask, log_decay=own, **others))
    torch.testing.assert_close(torch.cat(outs, dim=2), expected)


def test_values_of_zero_leave_what_the_state_holds() -> None:
    """A sum of weights without a sure sign: the values summed in the state are unknown."""
    spec = sr.AttentionSpec(series="polynomial", coefficients=(1.0, 0.5), feature_map="elu1")
    case = make_case(spec, shape=Shape(queries=9, keys=9))
    q, k, v = (case.tensors[key] for key in "qkv")
    v[:, :, 8] = 0.0
    stream = sr.Stream(spec)
    stream(*(x[:, :, :8] for x in (q, k, v)))
    last = stream(*(x[:, :, 8:] for x in (q, k, v)))
    torch.testing.assert_close(last, sr.attention(q, k, v, spec, form="dense")[:, :, 8:])


def test_a_spec_without_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="no finite state"):
        sr.Stream("norm")
    with pytest.raises(ValueError, match=r"A window \(window=5\) has no recurrent form"):
        sr.Stream(WIDENED["window_power"])
    with pytest.raises(ValueError, match=r"clamp=5.0\).*no recurrent form"):
        sr.Stream(sr.AttentionSpec(series="taylor", order=2, clamp=5.0))
