"""Conversion of a transformers model of any family: its own projections, another attention."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from softmax_rnn._utils.errors import shown
from softmax_rnn.models.converted import ConvertedModel, converted_config, converted_model, register
from softmax_rnn.models.converted_layer import (
    CONVERTED,
    INPUTS,
    PART,
    PROBE,
    UNSUPPORTED,
    Call,
    ConvertedLayer,
    inputs_of,
    pass_inputs,
    recorded_calls,
)
from softmax_rnn.models.converted_record import ConvertedAttention
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.systems import Variant
from softmax_rnn.ops.variants import resolve_layer

_SOFTMAX = AttentionSpec()
# Tensors that a family's module may pass to its attention without an effect on the result.
_HARMLESS = ("position_ids", "cache_position")


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
    if isinstance(model, ConvertedModel):
        raise ValueError(
            f"convert: this {type(model).__name__} is converted already; load the source again."
        )
    found = _layers(model, attention, layers, layer_options)
    family: Any = type(model.config)
    kind: Any = type(model)
    register(family)
    config = _own_config(model)
    for module, part in found:
        part.attach(module)
    _forget_gguf(model, config)
    records = [dataclasses.asdict(part.record) for _, part in found]
    config.softmax_rnn = {"source": config.model_type, "layers": records}
    config.__class__, model.__class__ = converted_config(family), converted_model(kind)
    model.set_attn_implementation("")  # its own, whatever is asked for
    return model


@contextlib.contextmanager
def softmax_layers(model: PreTrainedModel) -> Iterator[list[ConvertedLayer]]:
    """Let these layers compute the model's own attention within the context.

    Raises:
        ValueError: as :func:`convert`, for a model that it refuses.
    """
    found = _layers(model, "softmax", None, None)
    with _implementation(model, CONVERTED), contextlib.ExitStack() as undo:
        for module, part in found:
            undo.callback(part.attach(module).remove)
            undo.callback(delattr, module, PART)
        yield [part for _, part in found]


def _layers(
    model: PreTrainedModel, attention: Any, layers: Iterable[int] | None, layer_options: Any
) -> list[tuple[nn.Module, ConvertedLayer]]:
    """The attention modules of a model, and the layer for each; the model is not changed."""
    _check_model(model)
    calls = _examined(model)
    for call in calls:
        _check_call(call)
    indices: list[Any] = [getattr(call.module, "layer_idx", None) for call in calls]
    if None in indices or len(set(indices)) < len(indices):
        indices = list(range(len(calls)))
    variants = _variants(attention, layers, layer_options, indices)
    parts = [
        ConvertedLayer(_record(model, call, index, variants[index]))
        for call, index in zip(calls, indices, strict=True)
    ]
    for call, part in zip(calls, parts, strict=True):
        _check_softmax(call, part.record)
        part.to(call.query.device, call.query.dtype).train(call.module.training)
    return [(call.module, part) for call, part in zip(calls, parts, strict=True)]


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "The model must be one of transformers, as from_pretrained returns it, not "
            f"{shown(model)}."
        )
    name, config = type(model).__name__, model.config
    problems = {
        "is an encoder with a decoder": config.is_encoder_decoder,
        "has cross attention": getattr(config, "add_cross_attention", False),
        "has several parts with configurations of their own": config.sub_configs,
        "takes no input_ids": model.main_input_name != "input_ids",
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"{name} {problem}, which this library does not support.")


@contextlib.contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Evaluation mode, and the attention of this name in transformers' interface."""
    chosen, training = model.config._attn_implementation, [x.training for x in model.modules()]
    model.eval()
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(chosen)
        for module, mode in zip(model.modules(), training, strict=True):
            module.training = mode


def _examined(model: PreTrainedModel) -> list[Call]:
    """The calls of the attention for two tokens, with the modules' inputs.

    Raises:
        ValueError: if there are none, or modules of the same class make none.
    """
    name, ids = type(model).__name__, torch.ones(1, 2, dtype=torch.long, device=model.device)
    with _implementation(model, PROBE), torch.no_grad():
        with recorded_calls() as first:
            model.base_model(input_ids=ids)
        modules = [call.module for call in first]
        kinds = {type(module) for module in modules}
        missed = [x for x in model.modules() if type(x) in kinds and x not in modules]
        if not modules or missed:
            raise ValueError(
                f"The attention of {name} does not go through transformers' "
                "AttentionInterface, or not in every layer."
            )
        if len(set(modules)) < len(modules):
            raise ValueError(f"Several layers of {name} share an attention module.")
        hooks = [x.register_forward_pre_hook(pass_inputs, with_kwargs=True) for x in modules]
        try:
            with recorded_calls() as second:
                model.base_model(input_ids=ids)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"The attention of {name} takes no further arguments: {error}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
    return second


def _check_call(call: Call) -> None:
    """Raise ``ValueError`` for what this library's attention would leave out."""
    kind = type(call.module).__name__
    for name, what in UNSUPPORTED.items():
        if call.options.get(name) is not None:
            raise ValueError(f"{kind} has {what} ({name}), which no spec computes.")
    if call.mask is not None and call.mask.dtype != torch.bool:
        raise ValueError(f"{kind} adds a bias to its scores, which no spec computes.")
    if call.key.shape[2] != call.query.shape[2]:
        raise ValueError(f"The queries of {kind} see other tokens (cross attention).")
    known = (*_HARMLESS, "s_aux")
    for name, value in call.options.items():
        if isinstance(value, Tensor) and name not in known:
            raise ValueError(f"The attention of {kind} takes {name}, which is unknown.")
    if inputs_of(call) is None:
        raise ValueError(f"{kind} does not pass its arguments on to its attention.")


def _record(model: PreTrainedModel, call: Call, index: int, variant: Variant) -> ConvertedAttention:
    """The data of one converted layer."""
    names = {module: name for name, module in model.base_model.named_modules()}
    if call.module not in names:
        raise ValueError(f"A {type(call.module).__name__} is outside the base model.")
    inputs, options = inputs_of(call), call.options
    assert inputs is not None
    scaling, causal = options.get("scaling"), options.get("is_causal")
    width, window = call.query.shape[-1], options.get("sliding_window")
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * (index + 1)
    if window is None and kinds[index] != "full_attention":
        raise ValueError(f"Layer {index} is of type {kinds[index]!r}, which is unknown.")
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
        causal=bool(getattr(call.module, "is_causal", True) if causal is None else causal),
        sliding_window=window,
        sinks=options.get("s_aux") is not None,
    )


def _check_softmax(call: Call, record: ConvertedAttention) -> None:
    """Raise ``ValueError`` unless the family's own function is softmax attention, as ours is.

    It is the one that the module's file has for the implementation ``eager``.
    """
    eager = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if eager is None:
        return
    generator = torch.Generator().manual_seed(0)
    like = call.query.device, call.query.dtype
    shapes = (call.query.shape, call.key.shape, call.value.shape)
    # Scores of about 10, where a soft cap or a sink would show.
    q, k, v = (4 * torch.randn(shape, generator=generator).to(*like) for shape in shapes)
    mask = torch.zeros(1, 1, q.shape[2], k.shape[2]).to(*like)
    if record.causal:
        mask = mask.masked_fill(torch.ones_like(mask).triu(1) > 0, torch.finfo(q.dtype).min)
    options = {key: x for key, x in call.options.items() if key != INPUTS}
    softmax = dataclasses.replace(record, attention=_SOFTMAX.to_dict(), layer_options={})
    inputs, sinks = call.options[INPUTS], options.get("s_aux")
    with torch.no_grad():
        expected, _ = eager(call.module, q, k, v, mask, **options)
        found = ConvertedLayer(softmax)(q, k, v, None, inputs, record.causal, sinks)
    tolerance = 0.05 if q.dtype.itemsize == 2 else 1e-3
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(v.abs().max())):
        raise ValueError(
            f"The attention of {type(call.module).__name__} is not softmax of scaled "
            "products: what it adds is in no spec."
        )


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
