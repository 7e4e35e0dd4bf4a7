"""Shared parameters start equal."""

from __future__ import annotations

import pytest
import torch

import softmax_rnn as sr
from softmax_rnn.models import initialize
from test_modeling import NAMES, TINY


def start(name: str, seed: int) -> dict[str, torch.Tensor]:
    model = sr.SoftmaxRNNForCausalLM(sr.SoftmaxRNNConfig(attention=name, **TINY))
    initialize(model, seed)
    return model.state_dict()


NARROWER = ("q_proj", "k_proj")


@pytest.mark.parametrize("name", NAMES)
def test_shared_parameters_start_equal(name: str) -> None:
    softmax, other = start("softmax", 3), start(name, 3)
    assert softmax.keys() <= other.keys()
    for key, value in softmax.items():
        narrower = sr.layer_options(name).qk_dim is not None and key.split(".")[-2] in NARROWER
        assert narrower or torch.equal(other[key], value), key
    again = start(name, 3)
    assert all(torch.equal(again[key], value) for key, value in other.items())


def test_seeds_and_names_draw_different_values() -> None:
    first, second = start("gate", 0), start("gate", 1)
    for key, value in first.items():
        if value.ndim == 2:
            assert not torch.equal(value, second[key]), key
            assert value.std() == pytest.approx(0.02, rel=0.1)
    layers = [first[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_the_global_random_state_stays() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = sr.SoftmaxRNNForCausalLM(sr.SoftmaxRNNConfig(**TINY))
    torch.manual_seed(5)
    initialize(model, 0)
    assert torch.equal(torch.rand(3), expected)
