"""The model: transformers' Llama with its attention modules replaced by ours."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from softmax_rnn.models.attention import LlamaAttention
from softmax_rnn.models.cache import RecurrentCache, recurrent_bytes
from softmax_rnn.models.configuration import MASKING, SoftmaxRNNConfig
from softmax_rnn.ops.layer_parts import LayerPart

# Settings of generation that name a cache, and of assisted decoding, which crops its cache.
_CHOOSE_A_CACHE = (
    *("past_key_values", "cache_implementation", "is_assistant"),
    *("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"),
)


class SoftmaxRNNPreTrainedModel(LlamaPreTrainedModel):
    """What both models share."""

    config_class = SoftmaxRNNConfig

    def initialize_weights(self) -> None:
        """As the base class, plus the attention's own parameters; loaded weights do not change."""
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, LayerPart):
                own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                loaded = [x for x in own if getattr(x, "_is_hf_initialized", False)]
                values = [x.detach().clone() for x in loaded]
                module.reset_parameters()
                with torch.no_grad():
                    for x, value in zip(loaded, values, strict=True):
                        x.copy_(value)

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


class SoftmaxRNNForCausalLM(SoftmaxRNNPreTrainedModel, LlamaForCausalLM):
    """The language model, as ``LlamaForCausalLM``: the same parameter names, the same calls."""

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        # Skip LlamaForCausalLM's __init__: it would build a decoder stack that is not used.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = SoftmaxRNNModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``GenerationMixin.generate``, with :meth:`new_cache` if no cache is requested."""
        given = inspect.signature(super().generate).bind(inputs, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        configs = (given.get("generation_config"), self.generation_config)

        def setting(name: str) -> Any:  # a configuration's None stands for the model's own
            found = (given.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in found if value is not None), None)

        chosen = any(setting(name) not in (None, False) for name in _CHOOSE_A_CACHE)
        if setting("use_cache") is not False and not chosen:
            cache = self.new_cache()
            kwargs |= {"use_cache": False} if cache is None else {"past_key_values": cache}
        return super().generate(inputs, *args, **kwargs)

    def new_cache(self) -> Cache | None:
        """An empty cache: recurrent for a finite series, unless its states exceed the model.

        ``None`` if a short convolution needs a recurrent one, but the series is not finite.
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
    """The mask for our layer: one value per key if the last query is at the last key.

    Otherwise (a preallocated cache, packed sequences) it is the full mask of transformers.
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
