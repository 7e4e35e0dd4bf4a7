"""The attention layer by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import softmax_rnn as sr
from softmax_rnn import Attention
from softmax_rnn.ops.layer import rotate


@pytest.mark.parametrize("name", sr.variants())
def test_only_what_a_spec_needs_is_learned(name: str) -> None:
    spec = sr.variant(name)
    softmax = {key for key, _ in Attention(32, 4).named_parameters()}
    extra = {key for key, _ in Attention(32, 4, spec).named_parameters()} - softmax
    expected = set()
    if spec.input_gate:
        expected |= {"input_gate.weight", "input_gate.bias"}
    if spec.output_gate != "none":
        expected |= {"output_gate.weight", "output_gate.bias"}
    if spec.denominator == "learned_length":
        expected.add("length_logit")
    if spec.norm in ("rms", "layer"):
        expected.add("norm_weight")
    if spec.norm == "layer":
        expected.add("norm_bias")
    assert extra == expected


@pytest.mark.parametrize("name", sr.variants())
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    layer = Attention(32, 4, name, num_kv_heads=2)
    out = layer(torch.randn(2, 9, 32))
    out.square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        gate_under_l2 = name == "norm_gate_before" and key.startswith("output_gate")
        assert gate_under_l2 or parameter.grad.abs().sum() > 0, key


def test_an_input_gate_is_the_operations_own() -> None:
    """Gating the values before a cache is what the op's ``input_gate`` does."""
    torch.manual_seed(0)
    layer = Attention(32, 4, "input_gate", num_kv_heads=2)
    x = torch.randn(2, 9, 32)

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.view(2, 9, -1, 8).transpose(1, 2)

    assert layer.input_gate is not None
    out = sr.attention(
        heads(layer.q_proj(x)),
        heads(layer.k_proj(x)),
        heads(layer.v_proj(x)),
        layer.spec,
        input_gate=layer.input_gate(x).sigmoid().mT,
    )
    torch.testing.assert_close(layer(x), layer.o_proj(out.transpose(1, 2).flatten(2)))


def test_a_sequence_may_be_cut_anywhere() -> None:
    layer, x = Attention(32, 4, "taylor:2"), torch.randn(2, 9, 32)
    first, state = layer(x[:, :5], return_state=True)
    second = layer(x[:, 5:], state=state)
    torch.testing.assert_close(torch.cat((first, second), dim=1), layer(x))


def test_rotary_positions_are_those_of_transformers() -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8)
    expected, _ = apply_rotary_pos_emb(x, x, angles.cos(), angles.sin())
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), expected)


def test_the_spec_is_shown() -> None:
    layer = Attention(32, 4, dataclasses.replace(sr.variant("norm"), clamp=3.0))
    assert "clamp=3.0" in str(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, not 0"),
        ({"num_heads": 5}, "The 5 heads must divide the hidden size 32"),
        ({"num_heads": 4, "num_kv_heads": 3}, "The 3 key/value heads must divide the 4"),
        ({"num_heads": 4, "spec": "gates"}, "Did you mean 'gate'"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(32, **options)  # type: ignore[arg-type]
