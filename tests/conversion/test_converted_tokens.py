"""A decoded token of a converted model: one call of C++, with the results of one pass."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from converted_families import LEFT, converted
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.cpu import token as native_token

pytestmark = pytest.mark.skipif(
    bool(cpp.missing()), reason="needs g++ and SOFTMAX_RNN_CPU_KERNEL other than 0"
)
TOKENS, PROMPT = 26, 7
SECOND_ORDER: dict[str, Any] = {
    "attention": dataclasses.replace(sr.variant("window_state:5"), order=2),
    "layer_options": {"feature_map": "squared_relu", "map_before_rotary": True, "num_features": 9},
}
ROTATED = {"attention": "lolcats:4", "layer_options": {"map_before_rotary": False}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Llama", {"attention": "window_state:5"}),
    "first keys": ("Llama", {"attention": "window_state:1"}),
    "order 2": ("Qwen3", SECOND_ORDER),
    "partial rotation": ("Phi", {"attention": "lolcats:4"}),
    "neighbours": ("Cohere", {"attention": "window_state:9"}),
    "rotated features": ("Llama", ROTATED),
    "no rotation": ("GPT2", {"attention": "window_state:5"}),
    "no features": ("Llama", {"attention": sr.variant("window_taylor:2")}),
}
IDS = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(3))
SHOWN = torch.ones_like(IDS)
SHOWN[:, : LEFT.shape[1]] = LEFT


class Counted:
    """The calls of C++ for a token: whether each made its features; ``change`` may spoil them."""

    def __init__(self, patch: pytest.MonkeyPatch, change: Any = None) -> None:
        self.made: list[bool] = []
        original = native_token.following
        spoiled = change or (lambda features: features)

        def following(
            alike: Any, q: Tensor, k: Tensor, v: Tensor, state: Any, far: Any, *more: Any
        ):
            made = isinstance(far, native_token.Features)
            self.made.append(made)
            return original(alike, q, k, v, state, spoiled(far) if made else far, *more)

        patch.setattr(native_token, "following", following)


def decoded(model: Any, cache: Any, first: int = 0) -> Tensor:
    """The logits of all tokens from ``first`` on: a prompt at once, others one by one."""
    bounds = [first, *range(max(first + 1, PROMPT), TOKENS + 1)]
    found = [
        model(
            IDS[:, a:b], attention_mask=SHOWN[:, :b], past_key_values=cache, use_cache=True
        ).logits
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(found, dim=1) * SHOWN[:, first:, None]


def expected_of(model: Any) -> Tensor:
    logits = model(IDS, attention_mask=SHOWN, use_cache=False).logits
    return logits * SHOWN[..., None]


def away(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, padding, a window that is not full yet, every kind of rotation and of features."""
    family, options = CASES[name]
    model, counted = converted(family, **options).double(), Counted(monkeypatch)
    with torch.no_grad():
        found, expected = decoded(model, model.new_cache()), expected_of(model)
    assert away(found, expected) <= 1e-12
    layers = len(model.config.converted_layers)
    made = layers * (TOKENS - PROMPT - 1)  # the first token of a cache is checked
    assert sum(counted.made) == (0 if name == "no features" else made)
    assert len(counted.made) == made + layers


def shifted_places(features: Any) -> Any:
    own, other, places = features.inverse
    return features._replace(inverse=(own, other, places.roll(1)))


def without_shifts(features: Any) -> Any:
    return features._replace(shifts=None)


def exchanged(features: Any) -> Any:
    q, k = features.matrices
    return features._replace(matrices=(q.flip(0), k))


@pytest.mark.parametrize("change", [shifted_places, without_shifts, exchanged])
def test_each_part_of_the_features_matters(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = CASES["grouped"]
    model = converted(family, **options).double()
    Counted(monkeypatch, change)
    with torch.no_grad():
        assert away(decoded(model, model.new_cache()), expected_of(model)) > 1e-4


def test_a_state_serves_two_continuations() -> None:
    """A token changes nothing of the state before it, whose first keys the next one shares."""
    family, options = CASES["grouped"]
    model, cache = converted(family, **options).double(), None
    with torch.no_grad():
        cache = model.new_cache()
        expected = decoded(model, cache)
        half = model.new_cache()
        model(IDS[:, :20], attention_mask=SHOWN[:, :20], past_key_values=half, use_cache=True)
        model(IDS[:, 20:21], attention_mask=SHOWN[:, :21], past_key_values=half, use_cache=True)
        model(IDS[:, 21:22], attention_mask=SHOWN[:, :22], past_key_values=half, use_cache=True)
        states = [layer.state for layer in half.layers]
        before = [{name: x.clone() for name, x in s.tensors.items()} for s in states]
        for _ in range(2):
            for layer, state in zip(half.layers, states, strict=True):
                layer.state = state
            assert away(decoded(model, half, first=22), expected[:, 22:]) <= 1e-12
        for state, tensors in zip(states, before, strict=True):
            assert all(torch.equal(x, tensors[name]) for name, x in state.tensors.items())


def test_what_has_changed_since_the_last_token() -> None:
    """Weights in place, a type of weights that C++ cannot read, gradients, another spec."""
    family, options = CASES["grouped"]
    model = converted(family, **options).double()
    layer = model.model.layers[1].self_attn.softmax_rnn
    q, k, v = (torch.randn(2, n, 1, 8, dtype=torch.float64) for n in (4, 2, 2))

    def token(state: sr.State) -> Tensor | None:
        found = layer.next_token(q, k, v, state, None)
        return None if found is None else found[0]

    cache = model.new_cache()
    with torch.no_grad():
        decoded(model, cache)
        state = cache.layers[1].state
        first = token(state)
        assert first is not None
        layer.feature_map.q_matrix.mul_(-1.0)
        changed = token(state)
        assert changed is not None
        assert away(changed, first) > 1e-3
        assert token(dataclasses.replace(state)) is None  # nothing is known of this one
        assert layer.next_token(q.float(), k.float(), v.float(), state, None) is None
        assert layer.next_token(q[:1], k[:1], v[:1], state, None) is None
        assert layer.next_token(q, k, v * torch.nan, state, None) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert token(state) is None
        other = converted(family, "window_state:6").double().model.layers[1].self_attn.softmax_rnn
        assert other.next_token(q, k, v, state, None) is None
        layer.feature_map.q_matrix.data = layer.feature_map.q_matrix.data.float()
        assert token(state) is None
        layer.feature_map.double()
        assert token(state) is not None
    assert token(state) is None
    model.requires_grad_(False)
    layer.outside_logit.requires_grad_(True)
    logits = model(IDS[:, :1], past_key_values=cache, use_cache=True).logits
    logits.sum().backward()
    assert layer.outside_logit.grad.abs().min() > 0
