"""What convert takes and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LlamaForCausalLM,
)

import softmax_rnn as sr
from converted_families import (
    FAMILIES,
    IDS,
    REFUSED,
    converted,
    refused,
    source,
)
from softmax_rnn.conversion.probe import sample_tokens


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_difference_beyond_short_texts_is_found(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions agree, but from token 20 on the modules do not."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def compressed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = forward(self, *args, **kwargs)
        if self.config._attn_implementation == "eager":
            out[:, 20:] *= 1.2
        return out, weights

    monkeypatch.setattr(LlamaAttention, "forward", compressed)
    model = source("Llama", compress_rate=20).to(dtype)  # what the length is taken from
    with pytest.raises(ValueError, match=r"differs from its source by 0\.\d+ .* on 36 tokens"):
        sr.convert(model, "norm")
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Mixtral", "Lfm2", "GptOss"])
def test_rounding_is_no_difference(family: str, dtype: torch.dtype) -> None:
    """Of large scores, and of what chooses experts."""
    model = sr.convert(source(family).to(dtype), "softmax")
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 16),
        ({"sliding_window": 30}, 46),
        ({"sliding_window": 4096, "attention_chunk_size": 20}, 36),
        ({"compress_rates": {"some": 4, "others": 40}}, 56),
        ({"compress_rates": [3, 45], "max_position_embeddings": 50}, 46),
    ],
)
def test_the_length_of_a_comparison(fields: dict, tokens: int) -> None:
    assert sample_tokens(source("Llama", **fields)).shape == (1, tokens)


def test_what_could_not_be_loaded_again_is_not_converted() -> None:
    class Own(transformers.LlamaConfig):
        """Saved under the type of Llama."""

    model = LlamaForCausalLM(Own(**FAMILIES["Llama"][1]))
    with pytest.raises(ValueError, match="could not be loaded again: .* would be a ConvertedLlama"):
        sr.convert(model, "norm")
    assert type(model) is LlamaForCausalLM
