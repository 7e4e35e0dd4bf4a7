"""The caches of converted models: states, the last keys of a window, and keys with their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
)
from transformers.cache_utils import DynamicCache

from converted_families import (
    IDS,
    LEFT,
    converted,
)
from softmax_rnn.models.cache import state_bytes
from softmax_rnn.models.converted_cache import StateLayer
from test_modeling import GREEDY, HYBRID


@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "one"])
def test_first_and_last_keys_beside_features(layers: list[int] | None, tmp_path: Path) -> None:
    """exp of some keys, learned features of the others: in states, padded, saved."""
    model = converted("Llama", **HYBRID, layers=layers)
    given = {"input_ids": IDS, "attention_mask": LEFT, **GREEDY}
    cache = model.new_cache()
    for options in ({}, {"num_beams": 3}):
        expected = model.generate(**given, **options, use_cache=False)
        assert torch.equal(model.generate(**given, **options), expected)
    alone = model.generate(IDS[1:, 4:], **GREEDY, past_key_values=cache)
    assert torch.equal(alone[0, 8:], model.generate(**given)[1, 12:])
    for record in model.config.converted_layers:
        layer = cache.layers[record.index]
        if record.spec.has_state:
            assert isinstance(layer, StateLayer)
            sizes = record.num_kv_heads, record.key_width, record.value_width
            size = state_bytes(record.spec, record.options, *sizes, torch.float32)
            assert layer.state.nbytes == size + 8
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("family", "name", "held"), [("Llama", "window:3", 2), ("Mistral", "both_gates", 4)]
)
def test_a_window_holds_its_last_keys(family: str, name: str, held: int) -> None:
    model = converted(family, name)
    cache = model.new_cache()
    model.generate(IDS, past_key_values=cache, **GREEDY)
    assert {x.shape[2] for layer in cache.layers for x in layer.held.values()} == {held}
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_assisted_decoding_takes_keys_and_values() -> None:
    model, ids = converted("Llama", "taylor:2"), IDS[:1]
    settings = {**GREEDY, "eos_token_id": 60}
    expected = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), expected)


def test_caches_that_hold_too_little_are_refused() -> None:
    model = converted("Llama", "both_gates")
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="does not hold the gates or decays of earlier tokens"):
        model(IDS, past_key_values=cache)
    static = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
    expected = converted("Llama", "gate").generate(IDS, **GREEDY)
    assert torch.equal(converted("Llama", "gate").generate(IDS, **static), expected)
    with pytest.raises(ValueError, match=r"StaticLayer has unused keys.*use model.new_cache"):
        converted("Llama", "window:5").generate(IDS, **static)
