"""from_llama: the logits of what it accepts, and what is said of what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import softmax_rnn as sr
from softmax_rnn.models import from_llama
from test_modeling import GREEDY, TINY, build

WIDE = {**TINY, "max_position_embeddings": 16, "initializer_range": 0.3}
ROPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
)
FIELDS: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "hidden_act": "gelu",
    "num_key_value_heads": 1,
    "pretraining_tp": 2,
}


def made(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model whose norms and biases matter as well."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-1, 1)
    return model


@torch.no_grad()
def assert_same_logits(source: PreTrainedModel, folder: Path | None = None) -> None:
    ids = torch.arange(40)[None] % 61
    expected = source(ids).logits
    ours = from_llama(source)
    found = ours(ids).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    if folder is not None:
        assert torch.equal(ours.generate(ids, **GREEDY), source.generate(ids, **GREEDY))
        ours.save_pretrained(folder)
        saved = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert torch.equal(saved(ids).logits, found)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope and rope["rope_type"])
def test_any_llama_keeps_its_logits(rope: dict[str, Any] | None, tmp_path: Path) -> None:
    for changed in ({}, *({name: value} for name, value in FIELDS.items()), FIELDS):
        config = LlamaConfig(**{**WIDE, **changed, "rope_parameters": rope and dict(rope)})
        assert_same_logits(made(LlamaForCausalLM, config))
    assert_same_logits(made(LlamaForCausalLM, config), tmp_path)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope and rope["rope_type"])
@pytest.mark.parametrize("head_dim", [None, 16])
def test_a_mistral_without_a_window_is_a_llama(rope: dict[str, Any] | None, head_dim: Any) -> None:
    fields = {"rope_parameters": rope and dict(rope), "head_dim": head_dim}
    config = MistralConfig(**WIDE, sliding_window=None, **fields)
    assert_same_logits(made(MistralForCausalLM, config))


def test_our_own_softmax_is_a_llama() -> None:
    source = build("softmax")
    assert_same_logits(source)
    assert from_llama(source, "norm").config.spec.norm == "l2"


@pytest.mark.parametrize("cast", [False, True])
def test_frequencies_keep_their_dtype(cast: bool) -> None:
    """In bfloat16 they would turn far positions to other angles."""
    config = LlamaConfig(**WIDE)
    source = LlamaForCausalLM(config).bfloat16()
    if not cast:
        source = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(1000)[None] % 61
    ours = from_llama(source.eval())
    assert ours.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(
            ours.model.rotary_emb(ours.lm_head.weight, ids)[0],
            source.model.rotary_emb(source.lm_head.weight, ids)[0],
        )


@pytest.mark.parametrize(
    "family",
    ["Cohere", "GPTNeoX", "Gemma", "Granite", "Olmo", "Phi", "Phi3", "Qwen2", "Qwen3", "SmolLM3"],
)
def test_other_families_are_refused(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**WIDE, pad_token_id=0)
    source = getattr(transformers, f"{family}ForCausalLM")(config)
    with pytest.raises(
        ValueError,
        match=f"model_type of the source must be one of llama, mistral, softmax_rnn, "
        f"not '{config.model_type}'",
    ):
        from_llama(source)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=61)
            ),
            "model_type of the source must be one of .* not 'gpt2'",
        ),
        (
            lambda: MistralForCausalLM(MistralConfig(**WIDE, sliding_window=4)),
            r"sliding_window of the source must be None \(attention to all tokens\), not 4",
        ),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**WIDE, layer_types=["sliding_attention"] * 2)),
            "layer_types of the source must be None",
        ),
        (
            lambda: untied(LlamaForCausalLM(LlamaConfig(**WIDE, tie_word_embeddings=True))),
            "tie_word_embeddings of the source is True, but its lm_head does not share",
        ),
        (
            lambda: integers(LlamaForCausalLM(LlamaConfig(**WIDE))),
            r"must be in floating point, not \{'torch.int8'\}",
        ),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**WIDE, attention_dropout=0.1)),
            r"attention_dropout must be 0, not 0\.1",
        ),
        (lambda: build("norm"), "attention of the source must be softmax"),
        (
            lambda: LlamaForSequenceClassification(LlamaConfig(**WIDE)),
            "weights of this LlamaForSequenceClassification .* lm_head.weight, score.weight",
        ),
        (
            lambda: MistralForCausalLM(
                MistralConfig(**WIDE, sliding_window=None, attention_bias=True)
            ),
            r"these differ: model\.layers\.0\.self_attn\.k_proj\.bias, .* and more",
        ),
    ],
)
def test_what_is_no_llama_is_refused(source: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        from_llama(source())


def untied(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """Its configuration says otherwise."""
    llama.lm_head.weight = torch.nn.Parameter(torch.randn_like(llama.lm_head.weight))
    return llama


def integers(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    weight = llama.lm_head.weight.detach().to(torch.int8)
    llama.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return llama


def test_a_source_read_from_a_quantized_file() -> None:
    """Its weights are in floating point; its configuration still tells of the file."""
    llama = LlamaForCausalLM(LlamaConfig(**WIDE)).eval()
    ids = torch.randint(0, 61, (1, 9))
    expected = llama(ids).logits
    llama.config.quantization_config = {"quant_method": "gguf"}
    assert torch.equal(from_llama(llama)(ids).logits, expected)


@pytest.mark.parametrize("source", [None, "owner/llama", torch.nn.Linear(2, 2)])
def test_a_source_that_is_no_model_is_named(source: object) -> None:
    with pytest.raises(ValueError, match="the source must be a loaded model"):
        from_llama(source, "norm")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["taylorshift", "hedgehog", "mamba2", "gla", "softmax+decay"])
def test_new_parts_of_a_converted_model_are_as_in_a_fresh_one(name: str) -> None:
    llama = made(LlamaForCausalLM, LlamaConfig(**TINY))
    model = from_llama(llama, name)
    shared = llama.state_dict()
    fresh = sr.SoftmaxRNNForCausalLM(model.config).state_dict()
    drawn = ("proj", "down", "up", "output_gate", "log_rate", "decay.bias")
    for key, value in model.state_dict().items():
        if key in shared:
            assert torch.equal(value, shared[key]), key
        elif not any(part in key for part in drawn):
            assert torch.equal(value, fresh[key]), key


def test_options_of_a_converted_model() -> None:
    llama = made(LlamaForCausalLM, LlamaConfig(**TINY))
    with pytest.raises(ValueError, match="have width 8, those of this attention 16"):
        from_llama(llama, "based")
    model = from_llama(llama, "based", layer_options={"qk_dim": None})
    assert model.config.options == sr.LayerOptions()
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, from_llama(llama, "taylor:2")(ids).logits)
    # Neutral at first: a learned temperature of 1, a convolution that is the identity.
    neutral = {"temperature": True, "short_convolution": 3}
    converted = from_llama(llama, "softmax", layer_options=neutral)
    torch.testing.assert_close(converted(ids).logits, llama(ids).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="layer_options of the source must be those of softmax"):
        from_llama(converted)
