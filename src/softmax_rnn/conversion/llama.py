"""A Llama of transformers as a model of ours: the same weights, another attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from softmax_rnn._utils.errors import shown
from softmax_rnn.models.configuration import SoftmaxRNNConfig
from softmax_rnn.models.modeling import SoftmaxRNNForCausalLM
from softmax_rnn.ops import resolve_layer

_SOFTMAX, _PLAIN = (part.to_dict() for part in resolve_layer("softmax"))
_SOURCES = ("llama", "mistral", SoftmaxRNNConfig.model_type)
# Required values in a source's configuration; fields that ours shares with Llama are copied.
_RULES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "model_type": (f"one of {', '.join(_SOURCES)}", _SOURCES),
    "attention": ("softmax", (None, _SOFTMAX)),  # of our own models
    "layer_options": ("those of softmax", (None, _PLAIN)),
    "sliding_window": ("None (attention to all tokens)", (None,)),
    "layer_types": ("None (all layers alike)", (None,)),
}


def from_llama(
    llama: PreTrainedModel, attention: Any = "softmax", layer_options: Any = None
) -> SoftmaxRNNForCausalLM:
    """A model with a Llama's weights and another attention.

    Args:
        llama: the source: a ``LlamaForCausalLM``, or a model that computes the same (a Mistral
            without a sliding window, one of ours with softmax). Its parameters are copied.
        attention: a variant's name, a spec or its dict. With ``softmax`` the logits are those of
            the source; a variant's own gates and norms are newly initialised.
        layer_options: as in :class:`SoftmaxRNNConfig`.

    Returns:
        The model, on the source's device, in its dtype and mode.

    Raises:
        ValueError: for a source that computes something else; the message names the field of its
            configuration or the weights that differ.
    """
    if not isinstance(llama, PreTrainedModel):
        raise ValueError(
            "from_llama: the source must be a loaded model, as from_pretrained returns it, not "
            f"{shown(llama)}."
        )
    fields = llama.config.to_dict()
    for key, (words, allowed) in _RULES.items():
        if (value := fields.pop(key, None)) not in allowed:
            raise ValueError(
                f"from_llama: {key} of the source must be {words}, not {shown(value)}."
            )
    # After reading a GGUF file there is a quantization_config, but weights are in floating point.
    for key in ("architectures", "transformers_version", "quantization_config"):
        fields.pop(key, None)
    weights = llama.state_dict()
    with torch.device("meta"):
        plain = SoftmaxRNNForCausalLM(SoftmaxRNNConfig(**fields)).state_dict()
    expected, found = (
        {(name, *weight.shape) for name, weight in each.items()} for each in (plain, weights)
    )
    if expected != found:
        names = sorted({name for name, *_ in expected ^ found})
        raise ValueError(
            f"from_llama: the weights of this {type(llama).__name__} must be those of a "
            f"LlamaForCausalLM of its configuration; these differ: {', '.join(names[:5])}"
            f"{' and more' if len(names) > 5 else ''}."
        )
    tied = llama.lm_head.weight is llama.model.embed_tokens.weight
    if tied != llama.config.tie_word_embeddings:
        raise ValueError(
            f"from_llama: tie_word_embeddings of the source is {not tied}, but its lm_head "
            f"{'shares' if tied else 'does not share'} the weight of its embeddings."
        )
    if kinds := {str(x.dtype) for x in weights.values() if not x.is_floating_point()}:
        raise ValueError(
            f"from_llama: the weights of the source must be in floating point, not {kinds}."
        )
    config = SoftmaxRNNConfig(attention=attention, layer_options=layer_options, **fields)
    if config.options.qk_dim not in (None, config.head_dim):
        raise ValueError(
            f"from_llama: the queries and keys of the source have width {config.head_dim}, those "
            f"of this attention {config.options.qk_dim}: give layer_options={{'qk_dim': None}}."
        )
    model = SoftmaxRNNForCausalLM(config)
    model.load_state_dict(weights, strict=False)  # the variant's own parameters are missing
    model.generation_config = copy.deepcopy(llama.generation_config)
    model = model.to(llama.device, llama.dtype).train(llama.training)
    # Frequencies are not weights: they stay in float32 if a model was loaded in another dtype.
    model.model.rotary_emb = copy.deepcopy(llama.model.rotary_emb)
    return model
