"""What the attention modules of a family compute with, seen in forward passes of a few tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from softmax_rnn.conversion.layer import INPUTS, PROBE, pass_inputs
from softmax_rnn.conversion.rotations import rotation_of
from softmax_rnn.models.masks import full_mask

# A model is compared with its source on so many tokens that every window, chunk or compressor with
# at most _LONG tokens is in use. These are words in the names of such fields of a configuration.
_SHORT, _LONG = 16, 256
_LENGTHS = ("window", "chunk", "compress", "block", "stride", "topk", "local")
_TOKENS = 8  # enough positions to tell the ways to rotate apart


class Call(NamedTuple):
    """One call of the interface by a family's module."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


_calls: list[Call] = []  # of the forward pass that is going on


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # some families give it by name
    **options: Any,
) -> tuple[Tensor, None]:
    _calls.append(Call(module, query, key, value, attention_mask, options))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _calls_for(
    model: PreTrainedModel, ids: Tensor, modules: Sequence[nn.Module] = (), *hooks: Any
) -> list[Call]:
    """The calls of the attention for these tokens, with ``hooks`` before each of the modules."""
    with implementation(model, PROBE), torch.no_grad(), contextlib.ExitStack() as undo:
        undo.callback(_calls.clear)
        for module in modules:
            for hook in hooks:
                undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        model.base_model(input_ids=ids)
        return list(_calls)


def inputs_of(call: Call) -> Tensor | None:
    """The hidden states that a module with a hook has passed."""
    inputs = call.options.get(INPUTS)
    return None if inputs is None else inputs.hidden_states


@contextlib.contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn any error of a family's code into a ``ValueError`` that says what was tried."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{problem}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Evaluation mode, and the attention of this name in transformers' interface."""
    chosen, training = model.config._attn_implementation, {x: x.training for x in model.modules()}
    model.eval()
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(chosen)
        for module, mode in training.items():
            module.training = mode


def sample_tokens(model: PreTrainedModel) -> Tensor:
    """Random tokens [1, T], long enough for what the configuration can switch on."""

    def integers(value: Any) -> list[int]:
        if isinstance(value, dict | list | tuple):
            parts = value.values() if isinstance(value, dict) else value
            return [x for part in parts for x in integers(part)]
        return [value] if isinstance(value, int) and not isinstance(value, bool) else []

    fields = model.config.to_dict()
    found = [
        x
        for name, value in fields.items()
        if any(word in name for word in _LENGTHS)
        for x in integers(value)
    ]
    tokens = max([x for x in found if x <= _LONG], default=0) + _SHORT
    known = getattr(model.config, "max_position_embeddings", None)
    if isinstance(known, int) and known > 0:
        tokens = max(2, min(tokens, known - 4))  # some families begin to count at 2
    generator = torch.Generator().manual_seed(0)
    size = getattr(model.config, "vocab_size", None) or 2
    return torch.randint(size, (1, tokens), generator=generator).to(model.device)


def examined(model: PreTrainedModel) -> list[Call]:
    """The calls of the attention for some tokens, with the modules' inputs.

    Raises:
        ValueError: if there are none, or modules of the same class make none.
    """
    name, ids = type(model).__name__, sample_tokens(model)
    with explained(f"{name} cannot be examined"):
        modules = [call.module for call in _calls_for(model, ids)]
    kinds = {type(module) for module in modules}
    missed = [x for x in model.modules() if type(x) in kinds and x not in modules]
    if not modules or missed:
        raise ValueError(
            f"The attention of {name} does not go through transformers' "
            "AttentionInterface, or not in every layer."
        )
    if len(set(modules)) < len(modules):
        raise ValueError(
            f"Several layers of {name} share an attention module, or one computes several."
        )
    with explained(f"The attention of {name} takes no further arguments"):
        return _calls_for(model, ids, modules, pass_inputs)


def rotations(model: PreTrainedModel, modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The rotation of each attention module, a key of ``ROTATIONS``.

    Every module is given the same hidden states at all positions.

    Raises:
        ValueError: for a module whose positions cannot be taken off its queries and keys.
    """
    ids = torch.ones(1, _TOKENS, dtype=torch.long, device=model.device)
    calls = _calls_for(model, ids, modules, _alike_tokens, pass_inputs)
    found = {}
    for call in calls:
        if call.module not in modules:
            continue
        way = rotation_of(call.query, call.key, call.options[INPUTS].position_embeddings)
        if way is None:
            raise ValueError(
                f"{type(call.module).__name__} applies positions to queries and keys in a way that "
                "cannot be taken off, as map_before_rotary=True needs: give "
                "layer_options={'map_before_rotary': False}, whose features depend on absolute "
                "positions."
            )
        found[call.module] = way
    return found


def _alike_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a module the hidden states of the first token everywhere."""
    if args:
        return (args[0][:, :1].expand_as(args[0]), *args[1:]), kwargs
    first = kwargs["hidden_states"]
    return args, {**kwargs, "hidden_states": first[:, :1].expand_as(first)}


AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, full_mask)
