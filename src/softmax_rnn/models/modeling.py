"""The model: transformers' Llama with its attention modules replaced by ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMode
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from softmax_rnn.models.attention import LlamaAttention
from softmax_rnn.models.cache import RecurrentCache, recurrent_bytes
from softmax_rnn.models.configuration import MASKING, SoftmaxRNNConfig


class SoftmaxRNNPreTrainedModel(LlamaPreTrainedModel):
    """What both models share."""

    config_class = SoftmaxRNNConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_record_outputs = {"hidden_states": LlamaDecoderLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlamaAttention):
            module.reset_parameters()


class SoftmaxRNNModel(SoftmaxRNNPreTrainedModel, LlamaModel):
    """The decoder stack, as ``LlamaModel``."""

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = LlamaAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.spec,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                bias=config.attention_bias,
                layer_idx=index,
            )
        self.post_init()


class SoftmaxRNNForCausalLM(SoftmaxRNNPreTrainedModel, LlamaForCausalLM):
    """The language model, as ``LlamaForCausalLM``: the same parameter names, the same calls."""

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        # Past LlamaForCausalLM's own, whose stack would be built only to be thrown away.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = SoftmaxRNNModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Take :meth:`new_cache` where nothing else was asked for."""
        given = model_kwargs.get("past_key_values")
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, *args, **kwargs
        )
        # Tokens that were only proposed are cropped away again, in the draft model's cache as well.
        rewinds = (
            generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        )
        chosen = generation_config.cache_implementation is not None or given is not None
        if not chosen and not rewinds and model_kwargs.get("past_key_values") is not None:
            model_kwargs["past_key_values"] = self.new_cache()

    def new_cache(self) -> Cache:
        """An empty cache: recurrent for a finite series, unless its states outweigh the model."""
        states = recurrent_bytes(self.config, self.dtype)
        if states is None or states > self.num_parameters() * self.dtype.itemsize:
            return DynamicCache(config=self.config)
        return RecurrentCache()


def _causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask as our layer takes it: of keys alone wherever the last query is the last key.

    Otherwise (a preallocated cache, packed sequences) transformers' whole mask.
    """
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if not aligned or mask_function is not causal_mask_function:
        options = {"mask_function": mask_function, "attention_mask": attention_mask, **kwargs}
        options["allow_is_causal_skip"] = False
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **options)
    if attention_mask is None:
        return None
    shown = attention_mask[:, kv_offset : kv_offset + kv_length]
    shown = F.pad(shown, (0, kv_length - shown.shape[1]), value=False)
    if not torch.compiler.is_compiling() and shown.all():
        return None
    return shown[:, None, None]


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("The attention of this model is chosen by config.attention.")


AttentionMaskInterface.register(MASKING, _causal_mask)
AttentionInterface.register(MASKING, _unreachable)
AutoModel.register(SoftmaxRNNConfig, SoftmaxRNNModel)
AutoModelForCausalLM.register(SoftmaxRNNConfig, SoftmaxRNNForCausalLM)
