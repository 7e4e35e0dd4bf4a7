"""The model: transformers' Llama with its attention modules replaced by ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from softmax_rnn.layer import Attention
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
        if isinstance(module, Attention):
            module.reset_parameters()


class SoftmaxRNNModel(SoftmaxRNNPreTrainedModel, LlamaModel):
    """The decoder stack, as ``LlamaModel``."""

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = Attention(
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


def _causal_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Transformers' boolean mask; ``None`` only where our causal alignment says the same.

    Transformers also skips the mask when a preallocated cache holds nothing yet (T < S, aligned to
    the first keys); ours aligns the queries to the last keys.
    """
    if q_length not in (1, kv_length):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("The attention of this model is chosen by config.attention.")


AttentionMaskInterface.register(MASKING, _causal_mask)
AttentionInterface.register(MASKING, _unreachable)
AutoModel.register(SoftmaxRNNConfig, SoftmaxRNNModel)
AutoModelForCausalLM.register(SoftmaxRNNConfig, SoftmaxRNNForCausalLM)
