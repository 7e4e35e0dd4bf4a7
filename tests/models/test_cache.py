"""Generation with a recurrent cache."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter
from transformers.cache_utils import DynamicCache

import softmax_rnn as sr
from quick import first_quick
from softmax_rnn.models.cache_sizes import key_value_bytes, recurrent_bytes
from test_modeling import GREEDY, HYBRID, NAMES, build

FINITE = [name for name in NAMES if sr.variant(name).has_state]


@pytest.mark.parametrize("name", [*FINITE, "hybrid"])
def test_greedy_is_uncached(name: str, batch: dict[str, torch.Tensor]) -> None:
    model = build(**HYBRID) if name == "hybrid" else build(name)
    expected = model.generate(**batch, **GREEDY, use_cache=False)
    assert len(expected[:, 23:].unique()) > 1
    cache = sr.RecurrentCache()
    assert torch.equal(model.generate(**batch, **GREEDY, past_key_values=cache), expected)
    assert cache.get_seq_length() == 23 + GREEDY["max_new_tokens"] - 1
    assert cache.nbytes == recurrent_bytes(model.config, torch.float32, 2) + 2 * 2 * 8


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 3}, {"num_beams": 2}])
def test_sampling_and_beams_are_uncached(options: dict, batch: dict[str, torch.Tensor]) -> None:
    model = build("taylor:2")
    found = []
    for cache in ({"use_cache": False}, {"past_key_values": sr.RecurrentCache()}):
        torch.manual_seed(3)
        found.append(model.generate(**batch, **{**GREEDY, **options}, **cache))
    assert torch.equal(*found)


def test_generation_takes_states_unless_they_outweigh_the_model() -> None:
    def cache_of(name: str, **options: object) -> object:
        model = build(name)
        ids = torch.tensor([[1, 2, 3]])
        out = model.generate(ids, **GREEDY, return_dict_in_generate=True, **options)
        return type(out.past_key_values)

    assert cache_of("taylor:2") is sr.RecurrentCache
    assert cache_of("linear_elu") is sr.RecurrentCache
    assert cache_of("taylor:9") is DynamicCache  # 24,310 monomials: more than the model
    assert cache_of("softmax") is DynamicCache
    assert cache_of("clamped") is DynamicCache
    assert cache_of("taylor:2", cache_implementation="dynamic") is DynamicCache


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {"assistant_model": "taylor:2"}),
        ("taylor:2", {"assistant_model": "softmax"}),
        ("taylor:2", {"assistant_model": "taylor:2"}),
        ("norm", {"assistant_model": "linear_elu"}),
        ("taylor:2", {"prompt_lookup_num_tokens": 3}),
        ("taylor:2", {"assistant_early_exit": 1}),
    ],
)
def test_assisted_decoding_is_greedy(name: str, options: dict, batch: dict) -> None:
    model, ids = build(name), batch["input_ids"][:1]
    greedy = {**GREEDY, "eos_token_id": 60}  # transformers 5.6 looks for one among the proposed
    expected = model.generate(ids, **greedy)
    draft = options.get("assistant_model")
    if draft is not None:
        options = {"assistant_model": build(draft, num_hidden_layers=1)}
    assert torch.equal(model.generate(ids, **greedy, **options), expected)


def test_the_size_does_not_grow_with_the_text() -> None:
    model = build("taylor:2")
    sizes = []
    for tokens in (5, 50):
        cache = sr.RecurrentCache()
        model.generate(
            torch.ones(1, 4, dtype=torch.long),
            **{**GREEDY, "max_new_tokens": tokens},
            past_key_values=cache,
        )
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]
    assert key_value_bytes(model.config, torch.float32, 10) == 10 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature_map", ["identity", "elu1"])
def test_the_size_of_kept_keys(feature_map: str, dtype: torch.dtype) -> None:
    spec = {**HYBRID["attention"], "feature_map": feature_map}
    model, cache = build(**{**HYBRID, "attention": spec}).to(dtype), sr.RecurrentCache()
    model(torch.ones(3, 4, dtype=torch.long), past_key_values=cache)
    assert cache.nbytes == recurrent_bytes(model.config, dtype, 3) + 3 * 2 * 8


@pytest.mark.parametrize("name", ["taylor_elu:2", "hybrid"])
def test_saved_and_restored(name: str, tmp_path: Path, batch: dict[str, torch.Tensor]) -> None:
    model = build(**HYBRID) if name == "hybrid" else build(name)
    cache = sr.RecurrentCache()
    model(**batch, past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]
    restored = sr.RecurrentCache.load(tmp_path / "cache.safetensors")
    following = torch.randint(0, 61, (2, 3))
    shown = torch.cat([batch["attention_mask"], torch.ones(2, 3, dtype=torch.long)], dim=1)
    after = [
        model(input_ids=following, attention_mask=shown, past_key_values=each).logits
        for each in (cache, restored)
    ]
    assert torch.equal(*after)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("name", ["taylor:2+decay", "taylor_norm:2", "cosformer", "hybrid"])
def test_a_static_cache_keeps_its_addresses(
    name: str, options: dict, batch: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = build(**HYBRID) if name == "hybrid" else build(name, **CONVOLVED)
    settings = {**GREEDY, **options}
    expected = model.generate(**batch, **settings, use_cache=False)
    cache = sr.RecurrentCache(static=True)
    assert cache.is_compileable  # generate asks for it before there are states
    assert torch.equal(model.generate(**batch, **settings, past_key_values=cache), expected)
    assert int(cache.get_seq_length()) == expected.shape[1] - 1

    def addresses() -> list[int]:
        states = [layer.state for layer in cache.layers]
        return [x.data_ptr() for state in states for x in (*state.tensors.values(), state.tokens)]

    before = addresses()
    model(expected[:1, :2].expand(len(cache.layers[0].state.sums), 2), past_key_values=cache)
    assert int(cache.get_seq_length()) == expected.shape[1] + 1
    assert addresses() == before
    cache.save(tmp_path / "cache.safetensors")
    restored = sr.RecurrentCache.load(tmp_path / "cache.safetensors", static=True)
    assert restored.is_compileable
    assert torch.equal(restored.layers[1].state.sums, cache.layers[1].state.sums)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "name", first_quick(["taylor:2", "taylor:2+decay", "taylor_norm:2", "hybrid"])
)
def test_a_static_cache_is_compiled_once(name: str) -> None:
    """One graph, without breaks, for any number of tokens; the same tokens as uncompiled."""
    model = build(**HYBRID) if name == "hybrid" else build(name)
    prompt = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)

    def decoded(static: bool, step: Callable) -> list[torch.Tensor]:
        cache, found = sr.RecurrentCache(static), []
        ids = prompt
        for _ in range(6):
            logits = (step if found else model)(ids, past_key_values=cache).logits[:, -1:]
            found.append(logits)
            ids = logits.argmax(-1).contiguous()
        return found

    with torch.no_grad():
        torch.testing.assert_close(decoded(True, compiled), decoded(False, model))
    assert graphs.frame_count == 1


CONVOLVED = {"layer_options": {"short_convolution": 3}}


def convolved(name: str) -> sr.SoftmaxRNNForCausalLM:
    """A model whose convolutions are not the identity."""
    model = build(name, **CONVOLVED)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            kernel = layer.self_attn.short_convolution.kernel
            kernel.copy_(torch.randn_like(kernel))
    return model


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("name", ["taylor:2", "cosformer"])
def test_convolutions_keep_their_inputs(
    name: str, options: dict, batch: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = convolved(name)
    settings = {**GREEDY, **options}
    expected = model.generate(**batch, **settings, use_cache=False)
    assert not torch.equal(build(name).generate(**batch, **settings, use_cache=False), expected)
    found = model.generate(**batch, **settings, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    cache = found.past_key_values
    assert type(cache) is sr.RecurrentCache
    rows = 2 * options.get("num_beams", 1)
    assert cache.nbytes == recurrent_bytes(model.config, torch.float32, rows) + 2 * rows * 8
    cache.save(tmp_path / "cache.safetensors")
    restored = sr.RecurrentCache.load(tmp_path / "cache.safetensors")
    assert torch.equal(restored.layer(1).state.inputs, cache.layer(1).state.inputs)
    alone = {key: x[1:, 9:] for key, x in batch.items()}
    assert torch.equal(model.generate(**alone, **settings)[0], expected[1, 9:])


def test_convolutions_without_states_take_no_cache(batch: dict[str, torch.Tensor]) -> None:
    model = convolved("softmax")
    assert model.new_cache() is None
    expected = model.generate(**batch, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(**batch, **GREEDY), expected)
    with pytest.raises(ValueError, match="DynamicCache does not hold the last inputs of a short"):
        model.generate(**batch, **GREEDY, cache_implementation="dynamic")


@pytest.mark.parametrize(
    "name", ["softmax", "softmax+decay", "gla", "based", "performer", "rfa", "lolcats:3+decay"]
)
def test_the_size_of_a_key_value_cache(name: str) -> None:
    model, cache = build(name), DynamicCache()
    model(torch.ones(2, 7, dtype=torch.long), past_key_values=cache)
    found = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert found == key_value_bytes(model.config, torch.float32, 7, batch=2)


def test_a_file_of_an_earlier_version_has_no_magnitudes(tmp_path: Path) -> None:
    model, path = build("taylor:2"), tmp_path / "cache.safetensors"
    cache = sr.RecurrentCache()
    model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    cache.save(path)
    restored = sr.RecurrentCache.load(path)
    for name, x in cache.layers[0].state.tensors.items():
        assert torch.equal(restored.layers[0].state.tensors[name], x)
    for layer in cache.layers:
        layer.state = dataclasses.replace(layer.state, magnitudes=None, largest=None)
    cache.save(path)
    with pytest.raises(ValueError, match="saved by earlier versions have none"):
        sr.RecurrentCache.load(path)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("magnitudes", torch.Tensor.half, "of the dtype and device of its sums"),
        ("largest", torch.Tensor.double, "of the dtype and device of its sums"),
        ("visible", torch.Tensor.float, "visible must be .1. of torch.int64"),
        ("tokens", lambda _: -5, "tokens must be an integer >= 0, not -5"),
        ("tokens", lambda _: 1.5, "tokens must be an integer >= 0, not 1.5"),
        ("tokens", lambda _: "x", "tokens must be an integer >= 0, not 'x'"),
    ],
)
def test_a_file_of_other_types_is_refused(
    tmp_path: Path, name: str, changed: Callable[[Any], Any], message: str
) -> None:
    """C++ would read and write beyond the memory of its tensors."""
    path, cache = tmp_path / "cache.safetensors", sr.RecurrentCache()
    build("taylor:3")(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        states = json.loads(file.metadata()["states"])
    if name == "tokens":
        states[0][name] = changed(states[0][name])
    else:
        tensors[f"0.{name}"] = changed(tensors[f"0.{name}"])
    save_file(tensors, path, metadata={"states": json.dumps(states)})
    with pytest.raises(ValueError, match=message):
        sr.RecurrentCache.load(path)


def test_older_transformers_ask_by_another_name() -> None:
    """Without it a layer of theirs is abstract: 5.6 could not make one."""
    layer = sr.RecurrentCache().layer(0)
    assert layer.get_max_cache_shape() == layer.get_max_length() == -1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_file_cut_short_is_named(
    tmp_path: Path, batch: dict[str, torch.Tensor], share: float
) -> None:
    cache, path = sr.RecurrentCache(), tmp_path / "cache.safetensors"
    build("taylor:2")(**batch, past_key_values=cache)
    cache.save(path)
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(ValueError, match="is not what RecurrentCache.save wrote"):
        sr.RecurrentCache.load(path)


def test_batches_can_be_picked_repeated_and_reset(batch: dict[str, torch.Tensor]) -> None:
    model = build("taylor:2")
    cache = sr.RecurrentCache()
    model(**batch, past_key_values=cache)
    before = cache.layers[0].state
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].state.sums[2], before.sums[1])
    cache.batch_select_indices(torch.tensor([3]))
    assert torch.equal(cache.layers[0].state.sums[0], before.sums[1])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0


def test_mistakes_are_named(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3]])
    cache = sr.RecurrentCache()
    with pytest.raises(ValueError, match="infinitely many powers"):
        build("softmax")(ids, past_key_values=cache)
    build("taylor:2")(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="belongs to another spec"):
        build("taylor:3")(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="is empty"):
        sr.RecurrentCache().save(tmp_path / "cache.safetensors")
    cache.reset()
    with pytest.raises(ValueError, match="is empty"):
        cache.save(tmp_path / "cache.safetensors")
