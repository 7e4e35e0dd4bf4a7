"""Weights between transformers' Llama and ours."""

from __future__ import annotations

import copy
from typing import Any

from transformers import LlamaForCausalLM

from softmax_rnn.models.configuration import SoftmaxRNNConfig
from softmax_rnn.models.modeling import SoftmaxRNNForCausalLM


def from_llama(llama: LlamaForCausalLM, attention: Any = "softmax") -> SoftmaxRNNForCausalLM:
    """A model with a Llama's weights and another attention.

    Args:
        llama: the source; its parameters are copied.
        attention: a variant's name, a spec or its dict. With ``softmax`` the logits are those of
            the source; a variant's own gates and norms start fresh.

    Returns:
        The model, on the source's device, in its dtype and mode.

    Raises:
        ValueError: for a source with attention dropout, which this attention has not.
    """
    fields = llama.config.to_dict()
    for key in ("model_type", "architectures", "transformers_version"):
        fields.pop(key, None)
    model = SoftmaxRNNForCausalLM(SoftmaxRNNConfig(attention=attention, **fields))
    extra = set(model.state_dict()) - set(llama.state_dict())
    result = model.load_state_dict(llama.state_dict(), strict=False)
    assert set(result.missing_keys) == extra
    assert not result.unexpected_keys
    model.generation_config = copy.deepcopy(llama.generation_config)
    return model.to(llama.device, llama.dtype).train(llama.training)
