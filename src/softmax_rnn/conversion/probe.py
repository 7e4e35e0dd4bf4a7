"""Which rotary positions the attention modules of a family apply, found by a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from softmax_rnn.conversion.layer import INPUTS, pass_inputs, recorded_calls
from softmax_rnn.conversion.rotations import rotation_of

_TOKENS = 8  # enough positions to tell the ways to rotate apart


def rotations(model: PreTrainedModel, modules: Sequence[nn.Module]) -> list[str]:
    """The rotation of each attention module, a key of :data:`rotations.ROTATIONS`.

    Every module is given the same hidden states at all positions. The model is in evaluation mode,
    and its attention is ``PROBE``.

    Raises:
        ValueError: for a module whose positions cannot be taken off its queries and keys.
    """
    hooks = []
    for module in modules:
        hooks.append(module.register_forward_pre_hook(_alike_tokens, with_kwargs=True))
        hooks.append(module.register_forward_pre_hook(pass_inputs, with_kwargs=True))
    try:
        with recorded_calls() as calls, torch.no_grad():
            ids = torch.ones(1, _TOKENS, dtype=torch.long, device=model.device)
            model.base_model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    found = {
        call.module: rotation_of(call.query, call.key, call.options[INPUTS].position_embeddings)
        for call in calls
        if call.module in modules
    }
    for module in modules:
        if found[module] is None:
            raise ValueError(
                f"{type(module).__name__} applies positions to queries and keys in a way that "
                "cannot be taken off, as map_before_rotary=True needs: give "
                "layer_options={'map_before_rotary': False}, whose features depend on absolute "
                "positions."
            )
    return [str(found[module]) for module in modules]


def _alike_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a module the hidden states of the first token everywhere."""
    if args:
        return (args[0][:, :1].expand_as(args[0]), *args[1:]), kwargs
    first = kwargs["hidden_states"]
    return args, {**kwargs, "hidden_states": first[:, :1].expand_as(first)}
