"""The model: transformers' Llama with its attention modules replaced by ours."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from softmax_rnn.models.attention import LlamaAttention
from softmax_rnn.models.cache import RecurrentCache, recurrent_bytes
from softmax_rnn.models.configuration import MASKING, SoftmaxRNNConfig
from softmax_rnn.models.generation import OwnCacheGeneration, with_own_cache
from softmax_rnn.models.initialization import reset_unloaded
from softmax_rnn.models.masks import causal_mask


class SoftmaxRNNPreTrainedModel(LlamaPreTrainedModel):
    """What both models share."""

    config_class = SoftmaxRNNConfig

    def initialize_weights(self) -> None:
        """As the base class, plus the attention's own parameters; loaded weights do not change."""
        super().initialize_weights()
        reset_unloaded(self)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the base class; ``attn_implementation`` is ignored."""
        return super().from_pretrained(*args, **{**kwargs, "attn_implementation": MASKING})

    def set_attn_implementation(self, *_: Any, **__: Any) -> None:
        """Keep this package's: ``config.attention`` chooses the attention."""
        super().set_attn_implementation(MASKING)


class _NoMLP(nn.Module):
    """In place of an MLP: adds nothing to the residual stream."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(hidden_states)


class SoftmaxRNNModel(SoftmaxRNNPreTrainedModel, LlamaModel):
    """The decoder stack, as ``LlamaModel``; without MLPs if ``intermediate_size`` is 0."""

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            super().__init__(config)
        for index, layer in enumerate(self.layers):
            if config.intermediate_size == 0:
                layer.mlp, layer.post_attention_layernorm = _NoMLP(), nn.Identity()
            layer.self_attn = LlamaAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.spec,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                bias=config.attention_bias,
                options=config.options,
                layer_idx=index,
            )
        self.set_attn_implementation()  # AutoModel.from_config may have asked for another
        self.post_init()


class SoftmaxRNNForCausalLM(OwnCacheGeneration, SoftmaxRNNPreTrainedModel, LlamaForCausalLM):
    """The language model, as ``LlamaForCausalLM``: the same parameter names, the same calls."""

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        # Skip LlamaForCausalLM's __init__: it would build a decoder stack that is not used.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = SoftmaxRNNModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = with_own_cache(LlamaForCausalLM.forward)

    def new_cache(self) -> Cache | None:
        """An empty cache: recurrent for a finite series, unless its states exceed the model.

        It is also that of ``generate`` and ``use_cache=True``. ``None`` if a short convolution
        needs a recurrent one, but the series is not finite.
        """
        states = recurrent_bytes(self.config, self.dtype)
        convolved = self.config.options.short_convolution > 0
        if states is None and convolved:
            return None
        large = states is None or states > self.num_parameters() * self.dtype.itemsize
        return DynamicCache(config=self.config) if large and not convolved else RecurrentCache()


def checkpoint_activations(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Recompute activations in the backward pass; ``options`` are of torch's ``checkpoint``."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # its name in older versions of transformers
        model.gradient_checkpointing_enable(options)


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("The attention of this model is chosen by config.attention.")


AttentionMaskInterface.register(MASKING, causal_mask)
AttentionInterface.register(MASKING, _unreachable)
AutoModel.register(SoftmaxRNNConfig, SoftmaxRNNModel)
AutoModelForCausalLM.register(SoftmaxRNNConfig, SoftmaxRNNForCausalLM)
