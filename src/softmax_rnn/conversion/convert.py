"""Conversion of a transformers model of any family: its own projections, another attention."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from softmax_rnn.conversion.checks import (
    attached,
    check_call,
    check_model,
    check_outputs,
    check_return,
    check_softmax,
)
from softmax_rnn.conversion.layer import PART, ConvertedLayer, converted_layers
from softmax_rnn.conversion.model import converted_config, converted_model, register
from softmax_rnn.conversion.probe import Call, examined, inputs_of, rotations
from softmax_rnn.conversion.record import ConvertedAttention
from softmax_rnn.ops import AttentionSpec, Variant, resolve_layer

# The types of layers (in a configuration's layer_types) whose attention a conversion keeps.
_LAYER_TYPES = ("full_attention", "attention", "sliding_attention")


def convert(
    model: PreTrainedModel,
    attention: Any,
    layers: Iterable[int] | None = None,
    layer_options: Any = None,
) -> Any:
    """Replace the attention of a transformers model, in place.

    The model keeps its family's projections, query and key norms, positions, grouped queries,
    scale and sliding windows. It stays converted: a saved model is loaded by transformers' Auto
    classes after ``import softmax_rnn.models``, and not without it. Attention that is not converted
    remains softmax, computed by this library.

    Args:
        model: of any family whose attention goes through transformers' ``AttentionInterface``.
        attention: a variant's name, a spec or its dict; or a mapping from layers to these.
        layers: indices of the layers to convert; by default all. Not with a mapping.
        layer_options: :class:`softmax_rnn.LayerOptions` or a mapping of some of its fields, for all
            converted layers; by default those of the variant.

    Returns:
        The model itself, now of a subclass of its class. What a spec adds (gates, norms...) is
        newly initialised. For training, the attention dropout of the configuration must be 0.

    Raises:
        ValueError: for a model with an attention that this library does not compute (soft caps,
            biases by relative position, cross attention...), or an attention that its modules
            cannot have; the message names it. The model is then unchanged.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        >>> model = sr.convert(model, "taylor:2", layers=range(4, 28))
        >>> model.generate(ids)  # layers 4 to 27 keep a state, the others keys and values
    """
    found = _layers(model, attention, layers, layer_options)
    records = [dataclasses.asdict(part.record) for _, part in found]
    check_return(model, records)
    family: Any = type(model.config)
    kind: Any = type(model)
    register(family, kind)
    config = _own_config(model)
    for module, part in found:
        part.attach(module)
    _forget_gguf(model, config)
    config.softmax_rnn = {"source": config.model_type, "layers": records}
    config.__class__, model.__class__ = converted_config(family), converted_model(kind, family)
    model.set_attn_implementation("")  # its own, whatever is asked for
    return model


def modules_to_save(model: nn.Module) -> list[str]:
    """The names of the modules that hold a conversion's new parameters, as peft takes them.

    peft trains its own additions to linear layers and freezes all else. The new attention has to
    be trained as a whole; these names, given to peft, let it do that, and save it.

    Args:
        model: a converted model.

    Returns:
        What ``modules_to_save`` of peft's configurations takes; empty if nothing is new.

    Raises:
        ValueError: for a model that is not converted.

    Example:
        >>> model = sr.convert(model, "window_state:64")
        >>> settings = LoraConfig(
        ...     target_modules="all-linear", modules_to_save=sr.modules_to_save(model)
        ... )
        >>> model = get_peft_model(model, settings)
    """
    if not any(isinstance(module, ConvertedLayer) for module in model.modules()):
        raise ValueError(
            f"modules_to_save: this {type(model).__name__} is not converted; softmax_rnn.convert "
            "does that."
        )
    new = any(True for layer in converted_layers(model) for _ in layer.parameters())
    return [PART] if new else []


@contextlib.contextmanager
def softmax_layers(model: PreTrainedModel) -> Iterator[list[ConvertedLayer]]:
    """Let these layers compute the model's own attention within the context.

    Raises:
        ValueError: as :func:`convert`, for a model that it refuses.
    """
    found = _layers(model, "softmax", None, None)
    with attached(model, found):
        yield [part for _, part in found]


def _layers(
    model: PreTrainedModel, attention: Any, layers: Iterable[int] | None, layer_options: Any
) -> list[tuple[nn.Module, ConvertedLayer]]:
    """The attention modules of a model, and the layer for each; the model is not changed."""
    check_model(model)
    calls = examined(model)
    for call in calls:
        check_call(call)
    indices: list[Any] = [getattr(call.module, "layer_idx", None) for call in calls]
    if None in indices or len(set(indices)) < len(indices):
        indices = list(range(len(calls)))
    variants = _variants(attention, layers, layer_options, indices)
    records = [
        _record(model, call, index, variants[index])
        for call, index in zip(calls, indices, strict=True)
    ]
    parts = [ConvertedLayer(record) for record in _with_rotations(model, calls, records)]
    for call, part in zip(calls, parts, strict=True):
        check_softmax(call, part.record)
        part.to(call.query.device, call.query.dtype).train(call.module.training)
    check_outputs(model, calls, [part.record for part in parts])
    return [(call.module, part) for call, part in zip(calls, parts, strict=True)]


def _record(model: PreTrainedModel, call: Call, index: int, variant: Variant) -> ConvertedAttention:
    """The data of one converted layer."""
    names = {module: name for name, module in model.base_model.named_modules()}
    if call.module not in names:
        raise ValueError(f"A {type(call.module).__name__} is outside the base model.")
    inputs, options = inputs_of(call), call.options
    assert inputs is not None
    scaling, causal = options.get("scaling"), options.get("is_causal")
    causal = bool(getattr(call.module, "is_causal", True) if causal is None else causal)
    width, window = call.query.shape[-1], options.get("sliding_window")
    kinds = getattr(model.config, "layer_types", None) or []
    if index < len(kinds) and kinds[index] not in _LAYER_TYPES:
        raise ValueError(f"Layer {index} is of type {kinds[index]!r}, which is unknown.")
    if window is None and causal:  # some families tell their masks and caches alone
        layers = DynamicCache(config=model.config).layers[index : index + 1]
        window = next((x.sliding_window for x in layers if getattr(x, "is_sliding", False)), None)
    return ConvertedAttention(
        module=names[call.module],
        index=index,
        attention=variant.spec.to_dict(),
        layer_options=variant.options.to_dict(),
        hidden_size=inputs.shape[-1],
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        key_width=width,
        value_width=call.value.shape[-1],
        scaling=width**-0.5 if scaling is None else float(scaling),
        causal=causal,
        sliding_window=window,
        sinks=options.get("s_aux") is not None,
    )


def _with_rotations(
    model: PreTrainedModel, calls: list[Call], records: list[ConvertedAttention]
) -> list[ConvertedAttention]:
    """The records, with the rotations that feature maps before rotary positions need."""
    pairs = list(zip(calls, records, strict=True))
    chosen = [call.module for call, x in pairs if x.options.map_before_rotary]
    found = rotations(model, chosen) if chosen else {}
    return [
        dataclasses.replace(x, rotation=found[call.module]) if x.options.map_before_rotary else x
        for call, x in pairs
    ]


def _forget_gguf(model: PreTrainedModel, config: Any) -> None:
    """Let a model that was read from a GGUF file be saved, if its weights were unpacked."""
    method = getattr(model, "quantization_method", None)
    plain = all(x.is_floating_point() for x in model.parameters())
    if getattr(method, "value", method) != "gguf" or not plain:
        return
    for owner, names in (
        (model, ("hf_quantizer", "quantization_method", "is_quantized")),
        (config, ("quantization_config",)),
    ):
        for name in names:
            vars(owner).pop(name, None)


def _own_config(model: PreTrainedModel) -> Any:
    """A copy of the configuration in the model and its modules: others may share the first."""
    shared = model.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if value is shared:
                setattr(module, name, own)
    return own


def _variants(
    attention: Any, layers: Iterable[int] | None, options: Any, known: list[int]
) -> dict[int, Variant]:
    """What each layer computes."""
    per_layer = isinstance(attention, Mapping) and any(isinstance(key, int) for key in attention)
    if per_layer and layers is not None:
        raise ValueError("convert: layers says nothing more if attention is a mapping of layers.")
    if per_layer:
        chosen = dict(attention)
    else:
        chosen = dict.fromkeys(known if layers is None else layers, attention)
    for index in chosen:
        if index not in known:
            raise ValueError(f"convert: the layers of this model are {known}, not {index!r}.")
    found = dict.fromkeys(known, resolve_layer("softmax"))
    for index, spec in chosen.items():
        spec = AttentionSpec.from_dict(spec) if isinstance(spec, Mapping) else spec
        found[index] = resolve_layer(spec, options)
    return found
