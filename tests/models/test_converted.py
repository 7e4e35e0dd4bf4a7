"""convert: the same logits as the source for softmax, and as from_llama for everything else."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache

import softmax_rnn as sr
from softmax_rnn.models import from_llama
from softmax_rnn.models.cache import state_bytes
from softmax_rnn.models.converted_cache import KeyValueLayer, StateLayer
from softmax_rnn.models.modeling import checkpoint_activations
from test_modeling import GREEDY, HYBRID, NAMES, TINY

WIDE = {**TINY, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3}
EQUAL_HEADS = {key: x for key, x in WIDE.items() if key != "num_key_value_heads"}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# Class and configuration of a tiny model of each family.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", WIDE),
    "Mistral": ("MistralForCausalLM", {**WIDE, "sliding_window": 5}),
    "Mixtral": ("MixtralForCausalLM", {**WIDE, "num_local_experts": 2, "sliding_window": None}),
    "Qwen2": ("Qwen2ForCausalLM", {**WIDE, **MIXED, "use_sliding_window": True}),
    "Qwen3": ("Qwen3ForCausalLM", {**WIDE, "head_dim": 16}),
    "Gemma": ("GemmaForCausalLM", {**WIDE, "head_dim": 16}),
    "Gemma3Text": ("Gemma3ForCausalLM", {**WIDE, **MIXED, "head_dim": 16}),
    "Phi": ("PhiForCausalLM", {**WIDE, "partial_rotary_factor": 0.5}),
    "GPT2": ("GPT2LMHeadModel", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "GPTNeoX": ("GPTNeoXForCausalLM", EQUAL_HEADS),
    "Olmo": ("OlmoForCausalLM", WIDE),
    "Olmo2": ("Olmo2ForCausalLM", WIDE),
    "Granite": ("GraniteForCausalLM", {**WIDE, "attention_multiplier": 0.2}),
    "GptOss": (
        "GptOssForCausalLM",
        {**WIDE, **MIXED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Bert": ("BertForMaskedLM", EQUAL_HEADS),
    "ModernBert": (
        "ModernBertForMaskedLM",
        {**EQUAL_HEADS, "local_attention": 6, "global_attn_every_n_layers": 2},
    ),
}
CAUSAL = [name for name, (kind, _) in FAMILIES.items() if "Masked" not in kind]
SPECS = [
    *("norm", "gate", "taylor:2", "taylor:2+decay", "window:3", "linear_elu", "both_gates"),
    "lolcats:3",
]
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[1, :4] = 0


def source(family: str, kind: str | None = None, **fields: Any) -> Any:
    """A tiny model whose norms, biases and sinks matter as well."""
    name, config = FAMILIES[family]
    torch.manual_seed(0)
    given = {"bos_token_id": 1, "eos_token_id": 60, **config, **fields}
    model = getattr(transformers, kind or name)(
        getattr(transformers, f"{family}Config")(**given)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-1, 1)
    return model


def converted(family: str, attention: Any, **options: Any) -> Any:
    """A converted model whose own parameters are not at their initial values."""
    model = sr.convert(source(family), attention, **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "softmax_rnn" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def inputs(model: Any, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Padded inputs; hidden tokens do not count as positions."""
    given = {"input_ids": IDS, "attention_mask": mask}
    if "Masked" not in type(model).__name__:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_softmax_is_the_source(family: str, dtype: torch.dtype) -> None:
    if family in ("GptOss", "Mixtral") and dtype == torch.float64:
        pytest.skip("experts have no float64")
    model = source(family).to(dtype)
    masks = (torch.ones_like(LEFT), LEFT, LEFT.flip(1))
    expected = []
    for implementation in ("eager", "sdpa"):
        if family == "GptOss" and implementation == "sdpa":
            continue
        if dtype == torch.float64 and implementation == "eager":
            continue  # its weights are in float32
        model.set_attn_implementation(implementation)
        expected.append([model(**inputs(model, mask)).logits for mask in masks])
    sr.convert(model, "softmax")
    found = [model(**inputs(model, mask)).logits for mask in masks]
    assert all(x.isfinite().all() for x in found)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for theirs in expected:
        for mask, x, y in zip(masks, found, theirs, strict=True):
            shown = mask.bool()
            assert (x - y)[shown].abs().max() <= tolerance * y[shown].abs().max()


@pytest.mark.parametrize("family", CAUSAL)
def test_softmax_generates_as_the_source(family: str) -> None:
    model = source(family)
    given = {"input_ids": IDS, "attention_mask": LEFT, **GREEDY}
    expected = model.generate(**given)
    assert torch.equal(sr.convert(model, "softmax").generate(**given), expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_is_that_of_from_llama(name: str) -> None:
    """Bit for bit, gradients included: the weights and the operation are the same."""
    options = {"rotary": True, "qk_dim": None}
    ours = converted("Llama", name, layer_options=options)
    theirs = from_llama(source("Llama"), name, options)
    renamed = {key.replace(".softmax_rnn", ""): x for key, x in ours.state_dict().items()}
    theirs.load_state_dict(renamed)
    logits = [model(**inputs(model, LEFT)).logits for model in (ours, theirs)]
    # cosFormer's positions differ by a constant in a padded row; LoLCATs' features by a factor.
    rounded = name.startswith(("cosformer", "lolcats"))
    torch.testing.assert_close(*logits, rtol=0, atol=2e-5 if rounded else 0)
    for x in logits:
        x.square().mean().backward()
    gradients = {key: x.grad for key, x in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        expected = gradients[key.replace(".softmax_rnn", "")]
        tolerance = 1e-5 if rounded else 0
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=tolerance)
    with torch.no_grad():
        alone = ours(IDS[1:, 4:]).logits
        torch.testing.assert_close(logits[0][1, 4:], alone[0], rtol=1e-4, atol=1e-4)
        cache = ours.new_cache()
        parts = [ours(x, past_key_values=cache).logits for x in IDS.split([5, 1, 6], dim=1)]
        whole = ours(IDS, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "GptOss"])
def test_every_family_with_other_attentions(family: str, name: str, tmp_path: Path) -> None:
    bidirectional = family not in CAUSAL
    if bidirectional and sr.variant(name).causal_only:
        with pytest.raises(ValueError, match="sees later tokens, too; a decay or a window needs"):
            converted(family, name)
        return
    model = converted(family, name)
    plain = source(family)
    with torch.no_grad():
        found = model(**inputs(model, LEFT)).logits
        assert found.isfinite().all()
        assert not torch.allclose(found, plain(**inputs(plain, LEFT)).logits, atol=1e-3)
        alone = {key: x[1:, 4:] for key, x in inputs(model, LEFT).items()}
        if not bidirectional:  # whose positions count from the left
            torch.testing.assert_close(found[1, 4:], model(**alone).logits[0], rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path)
    auto = AutoModelForMaskedLM if bidirectional else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert type(loaded) is type(model)
    assert loaded.config.softmax_rnn == model.config.softmax_rnn
    with torch.no_grad():
        assert torch.equal(loaded(**inputs(loaded, LEFT)).logits, found)
    for module in model.modules():  # for a gradient
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()(**inputs(model, LEFT)).logits.square().mean().backward()
    gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    assert all(x.isfinite().all() for x in gradients.values())
    own = [key for key, _ in model.named_parameters() if "softmax_rnn" in key]
    assert all(gradients[key].abs().max() > 0 for key in own)
    if bidirectional:
        return
    model.eval()
    given = {"input_ids": IDS, "attention_mask": LEFT, **GREEDY}
    for options in ({}, {"num_beams": 3}):
        expected = model.generate(**given, **options, use_cache=False)
        assert torch.equal(model.generate(**given, **options), expected)


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


def test_padding_on_the_right_hides_nothing_from_a_bidirectional_row() -> None:
    model = converted("Bert", "norm")
    with torch.no_grad():
        found = model(IDS, attention_mask=LEFT.flip(1)).logits[1, :8]
        torch.testing.assert_close(found, model(IDS[1:, :8]).logits[0], rtol=1e-4, atol=1e-4)
        ahead = model(torch.cat((IDS[:, :8], IDS[:, 8:].flip(1)), 1)).logits
    assert not torch.allclose(ahead[:, 0], model(IDS).logits[:, 0])


def test_some_layers_only() -> None:
    ours = converted("Llama", "taylor:2+decay", layers=[1])
    assert [layer.spec.series for layer in ours.config.converted_layers] == ["exp", "taylor"]
    mapping = converted("Llama", {1: sr.variant("taylor:2+decay").to_dict()})
    assert mapping.config.softmax_rnn == ours.config.softmax_rnn
    assert torch.equal(mapping(IDS).logits, ours(IDS).logits)
    plain = source("Llama")
    assert torch.equal(
        ours.model.layers[0](ours.model.embed_tokens(IDS), **rotary(ours)),
        plain.model.layers[0](plain.model.embed_tokens(IDS), **rotary(plain)),
    )
    given = {"input_ids": IDS, "attention_mask": LEFT, **GREEDY}
    found = ours.generate(**given, return_dict_in_generate=True)
    layers = found.past_key_values.layers
    assert isinstance(layers[1], StateLayer)
    assert not isinstance(layers[0], StateLayer | KeyValueLayer)
    assert torch.equal(found.sequences, ours.generate(**given, use_cache=False))


def rotary(model: Any) -> dict[str, Any]:
    """The positions that a decoder layer takes."""
    x = model.model.embed_tokens(IDS)
    return {"position_embeddings": model.model.rotary_emb(x, torch.arange(12)[None])}


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


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("name", ["taylor:2+decay", "both_gates", "mamba2"])
def test_gradient_checkpointing_changes_no_gradient(name: str, reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = converted("Llama", name, layer_options={"rotary": True}).train()
        if checkpointing:
            checkpoint_activations(model, {"use_reentrant": reentrant})
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("family", "name"), [("Llama", "taylor:2+decay"), ("GPT2", "gate"), ("Bert", "norm")]
)
def test_compiled_logits_are_the_same(family: str, name: str) -> None:
    model = converted(family, name)
    given = {key: x for key, x in inputs(model, LEFT).items() if key != "position_ids"}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**given).logits, model(**given).logits)


def test_packed_sequences_do_not_see_each_other() -> None:
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    for name in ("softmax", "taylor:2+decay", "window:3"):
        model, ids = converted("Llama", name), IDS[:1]
        found = model(ids, position_ids=positions, use_cache=False).logits
        parts = [model(part, use_cache=False).logits for part in ids.split([7, 5], dim=1)]
        torch.testing.assert_close(found, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-4)


def test_masks_of_callers() -> None:
    model, shown = converted("Llama", "norm"), torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    torch.testing.assert_close(model(IDS, attention_mask=shown).logits, model(IDS).logits)
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~shown, -1e9)
    with pytest.raises(ValueError, match="an additive one could hold a bias"):
        model(IDS, attention_mask=additive)


def test_it_stays_converted(tmp_path: Path) -> None:
    """No way to load the model gives the family's own softmax without an error."""
    model = converted("Llama", "taylor:2")  # without parameters of its own
    model.save_pretrained(tmp_path / "model")
    model.model.save_pretrained(tmp_path / "base")
    for folder in ("model", "base"):
        base = AutoModel.from_pretrained(tmp_path / folder).eval()
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").softmax_rnn == model.config.softmax_rnn
    fresh = AutoModelForCausalLM.from_config(again.config, attn_implementation="eager")
    assert fresh(IDS).logits.shape == (2, 12, 61)
    for kind in (LlamaForCausalLM, transformers.LlamaModel):
        for options in ({}, {"attn_implementation": "sdpa"}):
            with pytest.raises(ValueError, match=r"import softmax_rnn\.models and use an Auto"):
                kind.from_pretrained(tmp_path / "model", **options)
    with pytest.raises(ValueError, match="This LlamaAttention was not converted"):
        LlamaForCausalLM(model.config)(IDS)
    for kind in ("AutoModelForCausalLM", "AutoModel", "LlamaForCausalLM"):
        code = (
            f"from transformers import {kind} as K; K.from_pretrained({str(tmp_path / 'model')!r})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1
        assert "softmax_rnn" in done.stderr


@pytest.mark.parametrize(
    "edit",
    [
        lambda layers: layers[1].update(index=0),
        lambda layers: layers[1].update(index=99),
    ],
)
def test_a_configuration_has_every_layer_once(tmp_path: Path, edit: Any) -> None:
    converted("Llama", "taylor:2").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    edit(fields["softmax_rnn"]["layers"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="must have the indices 0, 1, 2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_labels_survive(tmp_path: Path) -> None:
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    model = source("Llama", "LlamaForSequenceClassification", id2label=labels)
    sr.convert(model, "norm").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == model.config.id2label == labels
    assert loaded.num_labels == 3
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_no_other_implementation_is_chosen() -> None:
    model = converted("Llama", "norm")
    expected = model(IDS).logits
    model.set_attn_implementation("eager")
    assert torch.equal(model(IDS).logits, expected)
    model.model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="was converted, but its implementation is 'sdpa'"):
        model(IDS)
    model.set_attn_implementation("softmax_rnn_converted")
    assert torch.equal(model(IDS).logits, expected)


def test_copies_and_pickles() -> None:
    model = converted("Llama", "taylor:2+decay")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_other_models_of_the_same_configuration_do_not_change() -> None:
    model = source("Llama")
    other = LlamaForCausalLM(model.config).eval()
    expected = other(IDS).logits
    sr.convert(model, "norm")
    assert torch.equal(other(IDS).logits, expected)
    assert type(other.config) is transformers.LlamaConfig


def test_dtype_and_mode_are_the_sources() -> None:
    model = sr.convert(source("Llama").bfloat16().train(), "taylor:2+decay")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())
    assert model(IDS).logits.dtype == torch.bfloat16


REFUSED = {
    "a soft cap of the scores": ("Gemma2", "Gemma2ForCausalLM", {**WIDE, "head_dim": 16}),
    "does not go through transformers' AttentionInterface": ("Bloom", "BloomForCausalLM", {}),
    "several parts with configurations": ("Mpt", "MptForCausalLM", {}),
    "is an encoder with a decoder": ("T5", "T5ForConditionalGeneration", {"num_layers": 2}),
    "takes no input_ids": ("ViT", "ViTForImageClassification", EQUAL_HEADS),
    "share an attention module": ("Albert", "AlbertForMaskedLM", EQUAL_HEADS),
    "has cross attention": ("GPT2", "GPT2LMHeadModel", {**GPT2, "add_cross_attention": True}),
}


def refused(message: str) -> PreTrainedModel:
    """The model that is refused with this message."""
    family, kind, fields = REFUSED[message]
    small = {"vocab_size": 61, "hidden_size": 32, "d_model": 32, "n_layer": 2, "n_head": 4}
    config = getattr(transformers, f"{family}Config")(**(fields or small))
    model: PreTrainedModel = getattr(transformers, kind)(config)
    return model


@pytest.mark.parametrize("message", REFUSED)
def test_families_that_cannot_be_kept(message: str) -> None:
    model = refused(message)
    before = type(model), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        sr.convert(model, "softmax")
    assert (type(model), model.config.to_dict()) == before


def test_an_attention_that_is_not_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a family adds in its own function."""
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def louder(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, weights = eager(*args, **kwargs)
        return 1.1 * out, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", louder)
    with pytest.raises(ValueError, match="LlamaAttention is not softmax of scaled products"):
        sr.convert(source("Llama"), "norm")


@pytest.mark.parametrize(
    ("family", "attention", "options", "message"),
    [
        ("Llama", "nrom", {}, "Did you mean 'norm'"),
        ("Llama", "based", {}, r"qk_dim=16 would change.*layer_options={'qk_dim': None}"),
        ("Llama", "gla", {}, "rotary=False would change the family's own"),
        ("Llama", "norm", {"layer_options": {"short_convolution": 3}}, "short_convolution=3"),
        ("Llama", "norm", {"layers": [2]}, r"the layers of this model are \[0, 1\], not 2"),
        ("Llama", {0: "norm"}, {"layers": [0]}, "if attention is a mapping of layers"),
        ("Llama", {5: "norm"}, {}, r"are \[0, 1\], not 5"),
        ("GptOss", "norm", {}, "has attention sinks.*must be 'sum' or 'sum_plus_sink'"),
        ("Mistral", sr.AttentionSpec(window=3, global_keys=1), {}, "hides the first keys"),
    ],
)
def test_mistakes_are_named(family: str, attention: Any, options: dict, message: str) -> None:
    model = source(family)
    expected = model(IDS).logits
    with pytest.raises(ValueError, match=message):
        sr.convert(model, attention, **options)
    assert torch.equal(model(IDS).logits, expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_is_no_source() -> None:
    with pytest.raises(ValueError, match="must be one of transformers"):
        sr.convert("a folder", "norm")
    with pytest.raises(ValueError, match="is converted already"):
        sr.convert(converted("Llama", "norm"), "norm")


def test_dropout_and_weights_are_refused_when_used() -> None:
    model = sr.convert(source("GPT2"), "norm")
    model(IDS)
    with pytest.raises(ValueError, match=r"an attention dropout of 0, not 0\.1"):
        model.train()(IDS)
    with pytest.raises(ValueError, match="no matrix of weights"):
        converted("Llama", "norm")(IDS, output_attentions=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module": "layers.9.self_attn"}, "'layers.9.self_attn' is no module of LlamaModel"),
        ({"num_heads": 0}, "num_heads of a converted layer cannot be 0"),
        ({"scaling": "1"}, "scaling of a converted layer cannot be '1'"),
        ({"causal": 1}, "causal of a converted layer cannot be 1"),
        ({"hiden_size": 3}, "Did you mean 'hidden_size'"),
        ({"attention": {"nrm": "l2"}}, "Did you mean 'norm'"),
    ],
)
def test_damaged_configurations_are_named(change: dict, message: str, tmp_path: Path) -> None:
    converted("Llama", "norm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["softmax_rnn"]["layers"][0] |= change
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("source_type", [None, 3, "no_such_type", "softmax_rnn_converted"])
def test_an_unknown_family_is_named(source_type: object, tmp_path: Path) -> None:
    fields = {"model_type": "softmax_rnn_converted", "softmax_rnn": {"source": source_type}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"softmax_rnn\.source of a converted model must be"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_model_from_a_gguf_file_can_be_saved(tmp_path: Path) -> None:
    """transformers reads plain weights, and still takes the model for a quantised one."""
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    quantization = SimpleNamespace(quant_method="gguf")
    model.hf_quantizer = SimpleNamespace(quantization_config=quantization)
    model.is_quantized, model.quantization_method = True, "gguf"
    model.config.quantization_config = {"quant_method": "gguf"}
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)
    model = sr.convert(model, "norm")
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
