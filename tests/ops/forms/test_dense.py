"""Dense is the definition, and so is everything around it in ``attention``."""

from __future__ import annotations

import pytest
import torch

import softmax_rnn as sr
from cases import MASKS, VARIANTS, Shape, assert_close, make_case, with_directions
from softmax_rnn.ops import formula

SMALL = Shape(batch=1, heads=2, kv_heads=1, queries=5, keys=7, width=4, value_width=3)
EXTRA = {
    "odd_taylor": sr.AttentionSpec(series="taylor", order=3),
    "constant": sr.AttentionSpec(series="taylor", order=0),
    "negative_scale": sr.AttentionSpec(feature_map="elu1", scale=-0.5),
    "unclamped_rms": sr.AttentionSpec(denominator="none", norm="rms"),
    "gate_after_layer": sr.AttentionSpec(norm="layer", output_gate="after_norm"),
    "floor_and_epsilon": sr.AttentionSpec(epsilon=0.1, floor=2.0),
    "learned_length_rms": sr.AttentionSpec(denominator="learned_length", norm="rms"),
}


@pytest.mark.parametrize(("name", "causal"), with_directions([*VARIANTS, *EXTRA]))
def test_dense_is_the_definition(name: str, causal: bool) -> None:
    spec = EXTRA.get(name) or sr.variant(name)
    for mask in MASKS:
        case = make_case(spec, causal=causal, mask=mask, shape=SMALL)
        expected = case.run(formula.attention)
        assert_close(case.run(sr.attention, form="dense"), expected, 1e-10, mask)


def test_softmax_is_torch_softmax() -> None:
    case = make_case(sr.variant("softmax"), causal=False, shape=Shape(kv_heads=4))
    q, k, v = (case.tensors[name] for name in "qkv")
    expected = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    torch.testing.assert_close(sr.attention(q, k, v, "softmax", causal=False), expected)
