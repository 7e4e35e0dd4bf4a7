"""The caches of converted models: states, the last keys of a window, and keys with their values."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
)
from transformers.cache_utils import DynamicCache

import softmax_rnn as sr
from converted_families import (
    IDS,
    LEFT,
    converted,
    source,
)
from softmax_rnn.conversion.cache import StateLayer
from softmax_rnn.models.cache_sizes import state_bytes
from test_modeling import GREEDY, HYBRID, build


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
    cache.reset()
    assert cache.get_seq_length() == 0


def test_caches_that_hold_too_little_are_refused() -> None:
    model = converted("Llama", "both_gates")
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="does not hold the gates, decays or unrotated keys of"):
        model(IDS, past_key_values=cache)
    static = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
    expected = converted("Llama", "gate").generate(IDS, **GREEDY)
    assert torch.equal(converted("Llama", "gate").generate(IDS, **static), expected)
    with pytest.raises(ValueError, match=r"StaticLayer has unused keys.*use model.new_cache"):
        converted("Llama", "window:5").generate(IDS, **static)


@pytest.mark.parametrize(
    ("kind", "name", "grows"),
    [
        *(("own", name, False) for name in ("taylor:2", "lolcats:3", "window_state:3+decay")),
        *(("Llama", name, False) for name in ("taylor:2", "lolcats:3", "window:3")),
        ("Mistral", "lolcats:3", False),
        *(("Llama", name, True) for name in ("both_gates", {1: "window_state:3"})),
    ],
)
@torch.no_grad()
def test_the_obvious_call_makes_the_models_own_cache(
    kind: str, name: object, grows: bool, tmp_path: Path
) -> None:
    """As ``new_cache()``; one interface for our own models and converted ones."""
    model = build(name) if kind == "own" else converted(kind, name)
    ids, shown = torch.cat((IDS, IDS), 1), torch.cat((LEFT, torch.ones_like(LEFT)), 1)
    shown[0, 7:11] = 0  # padding in between, which a window forgets
    place = torch.cumsum(shown, 1).sub(1).clamp(min=0)

    def step(start: int, stop: int, cache: object) -> Any:
        given = {"attention_mask": shown[:, :stop], "position_ids": place[:, start:stop]}
        return model(ids[:, start:stop], past_key_values=cache, use_cache=True, **given)

    out = step(0, 12, None)
    cache = out.past_key_values
    assert type(cache) is type(model.new_cache()) is sr.RecurrentCache
    size = cache.nbytes
    out = step(12, 14, cache)
    assert out.past_key_values is cache
    assert (cache.nbytes > size) is grows
    cache.save(tmp_path / "cache.safetensors")
    restored = sr.RecurrentCache.load(tmp_path / "cache.safetensors")
    assert [type(layer) for layer in restored.layers] == [type(layer) for layer in cache.layers]
    assert (restored.nbytes, restored.get_seq_length()) == (cache.nbytes, 14)
    found = [step(14, 17, each).logits for each in (cache, restored)]
    assert torch.equal(*found)
    whole = model(ids, attention_mask=shown, position_ids=place, use_cache=False).logits
    torch.testing.assert_close(found[0], whole[:, 14:17], rtol=1e-4, atol=1e-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    restored.reorder_cache(torch.tensor([0, 1]))
    assert torch.equal(*[step(17, 19, each).logits for each in (cache, restored)])
    cache.reset()
    assert (cache.nbytes, cache.get_seq_length()) == (0, 0)
    with pytest.raises(ValueError, match="is empty"):
        cache.save(tmp_path / "empty.safetensors")


# What is wrong in a file: fields of a layer's keys and values, or tensors (None: left out).
DAMAGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another window": ({"window": 6}, {}),
    "no window": ({"window": None}, {}),
    "a window of nothing": ({"window": 0}, {}),
    "fewer tokens than are held": ({"tokens": 1}, {}),
    "fewer tokens than other layers": ({"tokens": 9}, {}),
    "no number of tokens": ({"tokens": None}, {}),
    "no values": ({}, {"values": None}),
    "fewer values": ({}, {"values": lambda x: x[:, :, 1:]}),
    "another batch": ({}, {"shown": lambda x: x[:1]}),
    "rounded values": ({}, {"values": lambda x: x.int()}),
    "numbers that show": ({}, {"shown": lambda x: x.float()}),
    "more tensors": ({}, {"more": lambda _: torch.zeros(1)}),
    "another layer's": ({}, {"7.keys": lambda _: torch.zeros(1)}),
}


@pytest.mark.parametrize("damage", DAMAGED)
@torch.no_grad()
def test_a_damaged_file_of_keys_is_refused(damage: str, tmp_path: Path) -> None:
    model, path = converted("GPTNeoX", "window:5+decay"), tmp_path / "cache.safetensors"
    cache = model(IDS, attention_mask=LEFT.flip(1), use_cache=True).past_key_values
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        layers = json.loads(file.metadata()["states"])
    save_file(tensors, path, metadata={"states": json.dumps(layers)})
    assert sr.RecurrentCache.load(path).get_seq_length() == IDS.shape[1]
    fields, changes = DAMAGED[damage]
    layers[1] |= fields
    for name, change in changes.items():
        key = name if "." in name else f"1.{name}"
        found = tensors.pop(key, None)
        if change is not None:
            tensors[key] = change(found).contiguous()
    save_file(tensors, path, metadata={"states": json.dumps(layers)})
    with pytest.raises(ValueError, match=r"is not what RecurrentCache\.save wrote"):
        sr.RecurrentCache.load(path)


def test_only_the_obvious_call_makes_it() -> None:
    """Nothing else changes: what a call without ``use_cache`` returns, or with a cache given."""
    model = converted("Llama", "taylor:2")
    assert type(model(IDS).past_key_values) is DynamicCache
    assert model(IDS, use_cache=False).past_key_values is None
    given = DynamicCache(config=model.config)
    assert model(IDS, past_key_values=given, use_cache=True).past_key_values is given
    by_place = model(IDS, None, None, None, None, None, True)
    assert type(by_place.past_key_values) is sr.RecurrentCache
    plain = converted("Llama", "softmax")
    assert type(plain(IDS, use_cache=True).past_key_values) is DynamicCache
    assert inspect.signature(model.forward) == inspect.signature(source("Llama").forward)
