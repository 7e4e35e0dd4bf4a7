"""The model against transformers' Llama, with and without a cache, saved and loaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.cache_utils import DynamicCache

import softmax_rnn as sr
from quick import first_quick
from softmax_rnn.models import from_llama, initialize
from softmax_rnn.models.modeling import checkpoint_activations
from softmax_rnn.ops.systems import SYSTEMS

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# And decays of variants of every kind: exp, a power under a sum, a norm, a polynomial.
NAMES = (
    *sr.variants(),
    *("softmax+decay", "gate+decay", "taylor:2+decay", "linear_elu+decay", "polynomial:2+decay"),
    *("window:5", "window:5+decay", "lolcats:5", "lolcats:5+decay"),
)
# exp of the last 5 and the first 2 keys, Hedgehog's features of the others, which fade.
HYBRID = {
    "attention": {**sr.variant("lolcats:5+decay").to_dict(), "global_keys": 2},
    "layer_options": {"feature_map": "hedgehog", "temperature": True},
}
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def build(attention: object, **fields: object) -> sr.SoftmaxRNNForCausalLM:
    """A tiny model with weights large enough to make attention matter."""
    model = sr.SoftmaxRNNForCausalLM(sr.SoftmaxRNNConfig(attention=attention, **{**TINY, **fields}))
    initialize(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.2)).eval()


def test_softmax_is_llama(llama: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> None:
    ours = from_llama(llama).eval()
    shown = batch["attention_mask"].bool()
    difference = (ours(**batch).logits - llama(**batch).logits)[shown]
    assert difference.abs().max() <= 1e-5
    ids = {"input_ids": batch["input_ids"]}
    assert (ours(**ids).logits - llama(**ids).logits).abs().max() <= 1e-5
    assert torch.equal(ours.generate(**batch, **GREEDY), llama.generate(**batch, **GREEDY))


def test_softmax_trains_as_llama(llama: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> None:
    ours = from_llama(llama)
    ids = batch["input_ids"]
    for model in (ours, llama):
        model(input_ids=ids, labels=ids).loss.backward()
    theirs = dict(llama.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, msg=name)


def test_from_llama_keeps_the_variants_own_parameters_fresh(llama: LlamaForCausalLM) -> None:
    ours = from_llama(llama, "layer_both_gates")
    assert torch.equal(ours.model.layers[0].self_attn.norm_weight, torch.ones(8))
    assert torch.equal(ours.lm_head.weight, llama.lm_head.weight)


def test_from_llama_keeps_mode_dtype_and_generation_settings(llama: LlamaForCausalLM) -> None:
    llama = llama.bfloat16()
    llama.generation_config.max_new_tokens = 7
    ours = from_llama(llama)
    assert (ours.training, ours.dtype) == (False, torch.bfloat16)
    assert from_llama(llama.train()).training
    assert ours.generation_config.max_new_tokens == 7
    llama.config.attention_dropout = 0.5
    with pytest.raises(ValueError, match="attention_dropout must be 0, not 0.5"):
        from_llama(llama)


@pytest.mark.parametrize("name", NAMES)
def test_cached_generation_is_uncached(name: str, batch: dict[str, torch.Tensor]) -> None:
    model = build(name)
    expected = model.generate(**batch, **GREEDY, use_cache=False)
    assert len(expected[:, 23:].unique()) > 1
    for cache in ("dynamic", "static"):
        if model.config.options.short_convolution:  # its last inputs are in no such cache
            with pytest.raises(ValueError, match="short convolution"):
                model.generate(**batch, **GREEDY, cache_implementation=cache)
            continue
        if cache == "static" and model.config.spec.positional:
            with pytest.raises(ValueError, match="StaticCache of fixed length has unused keys"):
                model.generate(**batch, **GREEDY, cache_implementation=cache)
            continue
        found = model.generate(**batch, **GREEDY, cache_implementation=cache)
        assert torch.equal(found, expected), cache
    # Left padding changes nothing: the second prompt alone goes on the same way.
    alone = {key: x[1:, 9:] for key, x in batch.items()}
    assert torch.equal(model.generate(**alone, **GREEDY)[0], expected[1, 9:])


@pytest.mark.parametrize("name", ["softmax", "taylor:2"])
def test_a_generation_config_leaves_the_models_own_settings(
    name: str, batch: dict[str, torch.Tensor]
) -> None:
    """A setting that the given configuration leaves open is the model's."""
    model, given = build(name), GenerationConfig(**GREEDY)
    expected = model.generate(**batch, **GREEDY, use_cache=False)
    for settings in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        model.generation_config = GenerationConfig(**settings)
        assert torch.equal(model.generate(**batch, generation_config=given), expected), settings
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert torch.equal(model.generate(ids, given, attention_mask=mask), expected), settings


@pytest.mark.parametrize("asked", ["eager", "sdpa", None])
def test_no_attention_of_transformers_is_chosen(
    asked: str | None, batch: dict[str, torch.Tensor]
) -> None:
    model = build("taylor:2")
    other = AutoModelForCausalLM.from_config(
        sr.SoftmaxRNNConfig(attention="taylor:2", **TINY), attn_implementation=asked
    )
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("eager")
    expected = model.generate(**batch, **GREEDY)
    assert torch.equal(other.eval().generate(**batch, **GREEDY), expected)


@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "gate",
        "both_gates",
        "linear_cosine",
        "forgetting",
        "gla",
        "cosformer",
        "window:5",
        "lolcats:5",
        "hybrid",
    ],
)
def test_chunks_against_a_cache(name: str) -> None:
    """Several tokens at once after others: queries aligned to the last keys."""
    model = build(**HYBRID) if name == "hybrid" else build(name)
    ids = torch.randint(0, 61, (1, 20))
    whole = model(input_ids=ids).logits
    cache, parts = DynamicCache(), []
    for part in ids.split([7, 1, 12], dim=1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_arguments_of_the_stack_by_position() -> None:
    """As many as ``LlamaModel`` takes: the fourth one is the cache."""
    model, ids = build("taylor:2").model, torch.randint(0, 61, (1, 9))
    cache = sr.RecurrentCache()
    found = [model(part, None, None, cache)[0] for part in ids.split([5, 4], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), model(ids)[0], atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("cache", [DynamicCache, sr.RecurrentCache])
def test_features_that_depend_on_positions_against_a_cache(cache: type) -> None:
    """cosFormer of a length at which positions matter."""
    model, ids = (
        build("cosformer", layer_options={"cosine_length": 24}),
        torch.randint(0, 61, (1, 20)),
    )
    whole, held = model(ids, use_cache=False).logits, cache()
    parts = [model(part, past_key_values=held).logits for part in ids.split([7, 1, 12], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
    longer = build("cosformer", layer_options={"cosine_length": 48})(ids, use_cache=False).logits
    assert not torch.allclose(longer, whole, atol=1e-2)


@pytest.mark.parametrize(
    "name",
    [
        *("norm", "layer_both_gates", "linear_cosine", "taylor:3", "softmax+decay"),
        *(name for name in sr.variants() if name.partition(":")[0] in SYSTEMS),
    ],
)
def test_saved_and_loaded(name: str, tmp_path: Path, batch: dict[str, torch.Tensor]) -> None:
    model = build(name)
    with torch.no_grad():  # nothing is at its initial value
        for key, value in model.state_dict().items():
            if "self_attn" in key:
                value.add_(0.1 * torch.randn_like(value))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert isinstance(loaded, sr.SoftmaxRNNForCausalLM)
    assert loaded.config.attention == sr.variant(name).to_dict()
    assert loaded.config.options == sr.layer_options(name)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert AutoConfig.from_pretrained(tmp_path).spec == sr.variant(name)


@pytest.mark.parametrize("name", ["norm_layer_length", "linear_cosine"])
def test_weights_that_a_file_lacks_start_as_in_a_fresh_model(name: str, tmp_path: Path) -> None:
    build("softmax").save_pretrained(tmp_path)
    own = {"norm_weight": 1.0, "norm_bias": 0.0, "length_logit": 0.5}
    config = sr.SoftmaxRNNConfig(attention=name, **TINY)
    loaded = sr.SoftmaxRNNForCausalLM.from_pretrained(tmp_path, config=config)
    found = {key.split(".")[-1]: x for key, x in loaded.named_parameters() if "self_attn" in key}
    assert any(key in found for key in own)
    for key, value in own.items():
        if key in found:
            assert torch.equal(found[key], torch.full_like(found[key], value)), key


@pytest.mark.parametrize("name", ["mamba2", "performer", "hedgehog", "forgetting"])
def test_parts_that_a_file_lacks_start_as_in_a_fresh_model(name: str, tmp_path: Path) -> None:
    build("softmax").save_pretrained(tmp_path)
    config = sr.SoftmaxRNNConfig(attention=name, **TINY)
    loaded = sr.SoftmaxRNNForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(loaded.lm_head.weight, build("softmax").lm_head.weight)
    layer = loaded.model.layers[1].self_attn
    if name == "mamba2":
        rate, step = layer.decay.log_rate.exp(), torch.nn.functional.softplus(layer.decay.bias)
        assert ((rate >= 1) & (rate <= 16)).all()
        assert ((step > 0.9e-3) & (step < 0.11)).all()
        assert torch.equal(layer.skip_weight, torch.ones(4))
    elif name == "performer":
        directions = layer.feature_map.directions
        assert (directions @ directions.T).triu(1).abs().max() < 1e-4
        assert 1 < directions.norm(dim=-1).mean() < 4
    elif name == "hedgehog":
        assert torch.equal(layer.feature_map.k_matrix, torch.eye(8).expand(2, 8, 8))
    else:
        torch.testing.assert_close(layer.decay.bias.sigmoid(), torch.tensor([31 / 32, 511 / 512]))


def test_options_in_a_config(tmp_path: Path) -> None:
    config = sr.SoftmaxRNNConfig(attention="based", layer_options={"temperature": True}, **TINY)
    assert config.options == sr.LayerOptions(qk_dim=16, temperature=True)
    assert config.spec == sr.variant("based")
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).options == config.options
    # A configuration that was saved before there were options.
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["layer_options"]
    path.write_text(json.dumps(fields))
    assert AutoConfig.from_pretrained(tmp_path).options == sr.LayerOptions()
    for options, message in (({"temprature": 1}, "Did you mean 'temperature'"), (3, "not 3")):
        with pytest.raises(ValueError, match=message):
            sr.SoftmaxRNNConfig(layer_options=options)


@pytest.mark.parametrize("name", ["forgetting", "gla", "performer"])
def test_cached_logits_in_bfloat16_are_the_uncached(name: str) -> None:
    """Decays in a cache have its precision: so they have it everywhere."""
    model, ids = build(name).bfloat16(), torch.randint(0, 61, (1, 20))
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache()
    parts = [model(x, past_key_values=cache).logits for x in ids.split([13, 1, 6], dim=1)]
    difference = (torch.cat(parts, dim=1) - whole).float()
    assert difference.norm() <= 0.02 * whole.float().norm()


def test_config_takes_a_name_a_spec_and_a_dict() -> None:
    spec = sr.variant("taylor:4")
    for attention in ("taylor:4", spec, spec.to_dict(), {"series": "taylor", "order": 4}):
        assert sr.SoftmaxRNNConfig(attention=attention, **TINY).attention == spec.to_dict()


def test_config_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="Did you mean 'norm'"):
        sr.SoftmaxRNNConfig(attention="nrom")
    with pytest.raises(ValueError, match="Did you mean 'norm'"):
        sr.SoftmaxRNNConfig(attention={"nrm": "l2"})
    with pytest.raises(ValueError, match="Unknown model size 'tiny'.*Allowed: demo"):
        sr.SoftmaxRNNConfig.of_size("tiny")


@pytest.mark.parametrize(
    ("size", "millions"), [("demo", 0.7), ("small", 275), ("large", 2080), ("deep", 695)]
)
def test_sizes_are_the_papers(size: str, millions: float) -> None:
    vocab = {"vocab_size": 257} if size == "demo" else {}
    with torch.device("meta"):
        model = sr.SoftmaxRNNForCausalLM(sr.SoftmaxRNNConfig.of_size(size, **vocab))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.04)


@pytest.mark.parametrize(
    "reentrant", first_quick([True, False]), ids=["reentrant", "not_reentrant"]
)
# Without a form for outside='series' its scale has no gradient yet.
@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_changes_no_gradient(name: str, reentrant: bool) -> None:
    ids = torch.randint(0, 61, (2, 17))
    grads = []
    for checkpointing in (False, True):
        model = build(name).train()
        if checkpointing:
            checkpoint_activations(model, {"use_reentrant": reentrant})
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_a_model_without_mlps(tmp_path: Path) -> None:
    """Each layer is attention alone; it saves, loads and generates."""
    config = sr.SoftmaxRNNConfig(
        attention="taylor:2+decay", layer_options={"short_convolution": 3}, vocab_size=20,
        hidden_size=16, intermediate_size=0, num_hidden_layers=2, num_attention_heads=2,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = sr.SoftmaxRNNForCausalLM(config)
    initialize(model, 0)
    names = [name for name, _ in model.named_parameters()]
    assert not any("mlp" in name or "post_attention" in name for name in names)
    ids = torch.randint(20, (2, 7))
    model(ids, labels=ids).loss.backward()
    assert all(x.grad is not None for x in model.parameters())
    layer = model.model.layers[0]
    x, rotary = torch.randn(1, 3, 16), model.model.rotary_emb(torch.randn(1, 3, 16), ids[:1, :3])
    attended = layer.self_attn(layer.input_layernorm(x), rotary)[0]
    torch.testing.assert_close(layer(x, position_embeddings=rotary), x + attended)
    model.save_pretrained(tmp_path)
    loaded = sr.SoftmaxRNNForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 10)
