"""The models: transformers' Llama with its attention modules replaced by ours.

A decoder that predicts the next token, and encoders (``is_causal=False``) of the same blocks.
"""

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
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)
from transformers.utils import can_return_tuple

from softmax_rnn.models.attention import LlamaAttention
from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.models.cache_sizes import recurrent_bytes
from softmax_rnn.models.configuration import MASKING, SoftmaxRNNConfig
from softmax_rnn.models.generation import OwnCacheGeneration, with_own_cache
from softmax_rnn.models.initialization import reset_unloaded
from softmax_rnn.models.masks import mask_of_keys
from softmax_rnn.ops import compute_dtype


class SoftmaxRNNPreTrainedModel(LlamaPreTrainedModel):
    """What all models share."""

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
    """The stack of blocks, as ``LlamaModel``; without MLPs if ``intermediate_size`` is 0.

    It is a decoder, or with ``is_causal=False`` an encoder.
    """

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        if not config.is_causal:  # also of a decoder's configuration that was changed
            config.use_cache = False
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
                is_causal=config.is_causal,
            )
        self.set_attn_implementation()  # AutoModel.from_config may have asked for another
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As ``LlamaModel``; in an encoder, positions begin at the first visible token.

        Positions that begin again there tell of packed sequences, as they do for causal attention,
        where transformers makes the mask.
        """
        if not self.config.is_causal and attention_mask is None and position_ids is not None:
            ids = find_packed_sequence_indices(position_ids)
            if ids is not None:
                attention_mask = (ids.unsqueeze(2) == ids.unsqueeze(1)).unsqueeze(1)
        of_tokens = attention_mask is not None and attention_mask.ndim == 2
        if not self.config.is_causal and of_tokens and position_ids is None:
            assert attention_mask is not None
            places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
            first = (attention_mask != 0).int().argmax(dim=-1, keepdim=True)
            position_ids = (places - first).clamp(min=0)
        return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)


class _WithHead(SoftmaxRNNPreTrainedModel, LlamaForCausalLM):
    """The stack and a head of tokens; the loss follows from the name of the subclass."""

    def __init__(self, config: SoftmaxRNNConfig, is_causal: bool = True) -> None:
        if config.is_causal != is_causal:
            raise ValueError(
                f"The configuration of a {type(self).__name__} must have is_causal={is_causal}, "
                f"not {config.is_causal}: an encoder (is_causal=False) is loaded by "
                "AutoModelForMaskedLM, and a decoder by AutoModelForCausalLM."
            )
        # Skip LlamaForCausalLM's __init__: it would build a decoder stack that is not used.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = SoftmaxRNNModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class SoftmaxRNNForCausalLM(OwnCacheGeneration, _WithHead):
    """The language model, as ``LlamaForCausalLM``: the same parameter names, the same calls."""

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


class SoftmaxRNNForMaskedLM(_WithHead):
    """An encoder that predicts hidden tokens: parameters and calls as of the language model.

    ``labels`` [B, T] are the tokens at the same places, -100 where none is asked for.

    Raises:
        ValueError: for a configuration without ``is_causal=False``.

    Example:
        >>> config = SoftmaxRNNConfig(attention="taylor:2", is_causal=False, **SIZES["demo"])
        >>> SoftmaxRNNForMaskedLM(config)(input_ids=ids, attention_mask=mask, labels=labels).loss
    """

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        super().__init__(config, is_causal=False)

    @classmethod
    def can_generate(cls) -> bool:
        """No: an encoder has no next token."""
        return False


class SoftmaxRNNForSequenceClassification(SoftmaxRNNPreTrainedModel):
    """A class (or a number) of each sequence: a linear map of the mean over its tokens.

    ``num_labels`` and ``problem_type`` of the configuration are as in transformers. The mean is
    over the tokens that the mask shows, so that padding changes nothing, on any side.
    """

    def __init__(self, config: SoftmaxRNNConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = SoftmaxRNNModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 for padding, any other number for a token.
            position_ids: the tokens' positions [B or 1, T].
            inputs_embeds: [B, T, hidden_size], in place of ``input_ids``.
            labels: [B] classes, [B] numbers (regression), or [B, num_labels].
            kwargs: further arguments of :class:`SoftmaxRNNModel` and of the loss.

        Raises:
            ValueError: for a mask of another shape, or for packed rows.
        """
        bounds, restarts = kwargs.get("cu_seq_lens_q"), False
        if position_ids is not None and attention_mask is None:
            restarts = not torch.compiler.is_compiling() and bool((position_ids.diff() != 1).any())
        if restarts or (bounds is not None and len(bounds) > 2):
            raise ValueError(
                "A row has one class, but this one holds several sequences: give each a row of its "
                "own, with padding. Where positions do not go up by one, another sequence begins; "
                "if it is one all the same, give its attention_mask."
            )
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(
                "The mean over a sequence needs a mask of its tokens, [B, T], not "
                f"{list(attention_mask.shape)}."
            )
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        out = self.model(
            attention_mask=attention_mask, position_ids=position_ids, **inputs, **kwargs
        )
        hidden, dtype = out.last_hidden_state, out.last_hidden_state.dtype
        hidden = hidden.to(compute_dtype(dtype))  # a sum over many tokens overflows float16
        shown = torch.ones_like(hidden[..., 0], dtype=torch.bool)
        if attention_mask is not None:
            shown = attention_mask != 0
        total = hidden.masked_fill(~shown.unsqueeze(-1), 0.0).sum(1)
        mean = total / shown.sum(1, keepdim=True).clamp(min=1)
        logits = self.score(mean.to(dtype))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, **kwargs
            )
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


def checkpoint_activations(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Recompute activations in the backward pass; ``options`` are of torch's ``checkpoint``."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # its name in older versions of transformers
        model.gradient_checkpointing_enable(options)


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("The attention of this model is chosen by config.attention.")


AttentionMaskInterface.register(MASKING, mask_of_keys)
AttentionInterface.register(MASKING, _unreachable)
AutoModel.register(SoftmaxRNNConfig, SoftmaxRNNModel)
AutoModelForCausalLM.register(SoftmaxRNNConfig, SoftmaxRNNForCausalLM)
AutoModelForMaskedLM.register(SoftmaxRNNConfig, SoftmaxRNNForMaskedLM)
AutoModelForSequenceClassification.register(SoftmaxRNNConfig, SoftmaxRNNForSequenceClassification)
