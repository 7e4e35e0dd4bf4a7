"""Tiny models of every family that can be converted, and what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    PreTrainedModel,
)

import softmax_rnn as sr
from test_modeling import TINY

WIDE = {**TINY, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3}
EQUAL_HEADS = {key: x for key, x in WIDE.items() if key != "num_key_value_heads"}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
HYBRID = {**WIDE, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
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
    "Cohere": ("CohereForCausalLM", WIDE),
    "GPTNeoX": ("GPTNeoXForCausalLM", EQUAL_HEADS),
    "Olmo": ("OlmoForCausalLM", WIDE),
    "Olmo2": ("Olmo2ForCausalLM", WIDE),
    "Granite": ("GraniteForCausalLM", {**WIDE, "attention_multiplier": 0.2}),
    "GptOss": (
        "GptOssForCausalLM",
        {**WIDE, **MIXED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Afmoe": ("AfmoeForCausalLM", {**WIDE, **MIXED, **EXPERTS, "head_dim": 8}),
    # In these families only some layers call attention.
    "Qwen3Next": (
        "Qwen3NextForCausalLM",
        {**HYBRID, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    ),
    "Qwen3_5Text": ("Qwen3_5ForCausalLM", {**HYBRID, **DELTA, "linear_value_head_dim": 8}),
    "Lfm2": ("Lfm2ForCausalLM", {**WIDE, "layer_types": ["conv", "full_attention"]}),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        {**WIDE, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 5},
    ),
    "Bert": ("BertForMaskedLM", EQUAL_HEADS),
    "ModernBert": (
        "ModernBertForMaskedLM",
        {**EQUAL_HEADS, "local_attention": 6, "global_attn_every_n_layers": 2},
    ),
}
CAUSAL = [name for name, (kind, _) in FAMILIES.items() if "Masked" not in kind]
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


FAST = ("Llama", "Mistral", "GPT2", "GptOss", "Qwen3Next", "Bert")


def cases(names: Iterable[str]) -> list[Any]:
    """Families as parameters of a test; most of them are left to the slow tests."""
    return [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in names]


REFUSED = {
    "31 keys for 25 tokens": (
        "DeepseekV4",
        "DeepseekV4ForCausalLM",
        {
            **WIDE,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 8,
            "o_lora_rank": 8,
            "o_groups": 2,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 5,
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 9},
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 2,
        },
    ),
    "DogeAttention adds a bias to its scores": ("Doge", "DogeForCausalLM", WIDE),
    "DeepseekV32Attention has a choice of keys": (
        "DeepseekV32",
        "DeepseekV32ForCausalLM",
        {
            **EQUAL_HEADS,
            **MLA,
            "v_head_dim": 8,
            "n_routed_experts": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
        },
    ),
    "GlmMoeDsaAttention has a choice of keys": (
        "GlmMoeDsa",
        "GlmMoeDsaForCausalLM",
        {
            **EQUAL_HEADS,
            **MLA,
            "v_head_dim": 8,
            "n_routed_experts": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
        },
    ),
    "has a class of caches of its own": ("MiniMax", "MiniMaxForCausalLM", WIDE),
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
