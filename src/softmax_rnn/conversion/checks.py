"""What a model of transformers must be for a conversion; nothing here changes the model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.cache_utils import Cache

from softmax_rnn._utils.errors import shown
from softmax_rnn.conversion.layer import CONVERTED, INPUTS, PART, UNSUPPORTED, ConvertedLayer
from softmax_rnn.conversion.model import ConvertedModel, converted_config, converted_model
from softmax_rnn.conversion.probe import Call, explained, implementation, inputs_of, sample_tokens
from softmax_rnn.conversion.record import ConvertedAttention
from softmax_rnn.ops import AttentionSpec

_SOFTMAX = AttentionSpec().to_dict()
# Tensors that a family's module may pass to its attention without an effect on the result.
_HARMLESS = ("position_ids", "cache_position")
_Given = dict[int | str, Tensor]  # some arguments of a call, by place or name


def check_model(model: Any) -> None:
    """Raise ``ValueError`` for a kind of model that is never converted."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "The model must be one of transformers, as from_pretrained returns it, not "
            f"{shown(model)}."
        )
    if isinstance(model, ConvertedModel):
        raise ValueError(
            f"convert: this {type(model).__name__} is converted already; load the source again."
        )
    name, config = type(model).__name__, model.config
    problems = {
        "is an encoder with a decoder": config.is_encoder_decoder,
        "has cross attention": getattr(config, "add_cross_attention", False),
        "has several parts with configurations of their own": any(
            getattr(config, name, None) is not None for name in config.sub_configs
        ),
        "takes no input_ids": model.main_input_name != "input_ids",
        "has a class of caches of its own": _own_cache(type(model)),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"{name} {problem}, which this library does not support.")


def _own_cache(model: type) -> bool:
    """Whether the file of a family's model defines a class of caches."""
    names = vars(sys.modules[model.__module__])
    caches = (x for x in names.values() if isinstance(x, type) and issubclass(x, Cache))
    return any(x.__module__ == model.__module__ for x in caches)


@contextlib.contextmanager
def attached(
    model: PreTrainedModel, layers: Sequence[tuple[nn.Module, ConvertedLayer]]
) -> Iterator[None]:
    """Let these layers compute the attention of the modules within the context."""
    with implementation(model, CONVERTED), contextlib.ExitStack() as undo:
        for module, part in layers:
            undo.callback(part.attach(module).remove)
            undo.callback(delattr, module, PART)
        yield


def check_call(call: Call) -> None:
    """Raise ``ValueError`` for what this library's attention would leave out."""
    kind = type(call.module).__name__
    for name, what in UNSUPPORTED.items():
        if call.options.get(name) is not None:
            raise ValueError(f"{kind} has {what} ({name}), which no spec computes.")
    if call.mask is not None and call.mask.dtype != torch.bool:
        raise ValueError(f"{kind} adds a bias to its scores, which no spec computes.")
    keys, queries = call.key.shape[2], call.query.shape[2]
    if keys != queries:
        raise ValueError(
            f"{kind} has {keys} keys for {queries} tokens (cross attention, or compressed keys), "
            "which no spec computes."
        )
    known = (*_HARMLESS, "s_aux")
    for name, value in call.options.items():
        if isinstance(value, Tensor) and name not in known:
            raise ValueError(f"The attention of {kind} takes {name}, which is unknown.")
    if inputs_of(call) is None:
        raise ValueError(f"{kind} does not pass its arguments on to its attention.")


def _softmax(record: ConvertedAttention) -> ConvertedLayer:
    """A layer that computes the source's own attention."""
    return ConvertedLayer(dataclasses.replace(record, attention=_SOFTMAX, layer_options={}))


def check_softmax(call: Call, record: ConvertedAttention) -> None:
    """Raise ``ValueError`` unless the family's own function is softmax attention, as ours is.

    It is the one that the module's file has for the implementation ``eager``.
    """
    eager = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if eager is None:
        return
    generator = torch.Generator().manual_seed(0)
    # In a half type scores of this size would be rounded by more than a soft cap changes them.
    like = call.query.device, torch.promote_types(call.query.dtype, torch.float32)
    shapes = (call.query.shape, call.key.shape, call.value.shape)
    # Scores of about 10, where a soft cap or a sink would show.
    q, k, v = (4 * torch.randn(shape, generator=generator).to(*like) for shape in shapes)
    mask = torch.zeros(1, 1, q.shape[2], k.shape[2]).to(*like)
    if record.causal:
        mask = mask.masked_fill(torch.ones_like(mask).triu(1) > 0, torch.finfo(q.dtype).min)
    options = {key: x for key, x in call.options.items() if key != INPUTS}
    inputs, sinks = call.options[INPUTS], options.get("s_aux")
    with torch.no_grad():
        expected, _ = eager(call.module, q, k, v, mask, **options)
        found = _softmax(record)(q, k, v, None, inputs, record.causal, sinks)
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(v.abs().max())):
        raise ValueError(
            f"The attention of {type(call.module).__name__} is not softmax of scaled "
            "products: what it adds is in no spec."
        )


def check_outputs(model: PreTrainedModel, calls: Sequence[Call], records: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless the whole model, with our softmax, computes what its source does.

    The last hidden states are compared, for a row of :func:`sample_tokens` and a padded one. In
    half types it is the output of every attention module, each on its input in the source: in a
    mixture of experts, rounding would choose others.
    """
    name, ids = type(model).__name__, sample_tokens(model)
    padded = torch.ones_like(ids)
    padded[:, : ids.shape[1] // 4] = 0
    layers = [(call.module, _softmax(record)) for call, record in zip(calls, records, strict=True)]
    half = model.dtype.itemsize == 2
    allowed = 0.05 if half else 1e-3

    def run(
        mask: Tensor | None, inputs: Sequence[_Given] = ()
    ) -> tuple[list[_Given], list[Tensor]]:
        """Inputs of the modules, in half types those given; what is compared."""
        with _recorded([call.module for call in calls], inputs) as (taken, made):
            last = model.base_model(input_ids=ids, attention_mask=mask)[0]
        compared = made if half else [last]
        return taken, [x.float() if mask is None else x[mask.bool()].float() for x in compared]

    with torch.no_grad():
        with implementation(model, "eager"), explained(f"{name} cannot be examined"):
            expected = [run(mask) for mask in (None, padded)]
        with attached(model, layers), explained(f"{name} does not run with another attention"):
            found = [
                run(mask, inputs if half else ())[1]
                for mask, (inputs, _) in zip((None, padded), expected, strict=True)
            ]
    pairs = [
        (x, y)
        for ours, (_, theirs) in zip(found, expected, strict=True)
        for x, y in zip(ours, theirs, strict=True)
        if y.isfinite().all()  # not so with padding in float64: too much for eager's float32
    ]
    if not pairs:
        raise ValueError(f"{name} gives no finite numbers in {model.dtype}, on random tokens.")
    for x, y in pairs:
        if not (x - y).norm() <= allowed * y.norm():
            raise ValueError(
                f"{name} with the softmax of this library differs from its source by "
                f"{float((x - y).norm() / y.norm()):.2g} of its "
                f"{'attention' if half else 'last hidden states'}, on {ids.shape[1]} tokens: it "
                "does something that no spec computes."
            )


@contextlib.contextmanager
def _recorded(
    modules: Sequence[nn.Module], inputs: Sequence[_Given]
) -> Iterator[tuple[list[_Given], list[Tensor]]]:
    """Hidden states that these modules take, and their outputs, in the order of calls.

    ``inputs`` replace the former.
    """
    taken: list[_Given] = []
    made: list[Tensor] = []

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        hidden = {
            key: x
            for key, x in given.items()
            if isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
        }
        taken.append(hidden)
        given |= inputs[len(taken) - 1] if inputs else {}
        return tuple(given.pop(place) for place in range(len(args))), given

    def after(_: nn.Module, __: Any, output: Any) -> None:
        made.append(output[0] if isinstance(output, tuple) else output)

    with contextlib.ExitStack() as undo:
        for module in modules:
            undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(after).remove)
        yield taken, made


def check_return(model: PreTrainedModel, layers: Sequence[dict[str, Any]]) -> None:
    """Raise ``ValueError`` unless the converted model could be saved, loaded and generate."""
    family: Any = type(model.config)
    kind = type(model)
    config = copy.deepcopy(model.config)
    config.softmax_rnn = {"source": config.model_type, "layers": layers}
    config.architectures = [converted_model(kind, family).__name__]
    config.__class__ = converted_config(family)
    with (
        explained(f"A converted {kind.__name__} could not be loaded again"),
        tempfile.TemporaryDirectory() as folder,
        torch.device("meta"),
    ):
        config.save_pretrained(folder)
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True)
        if type(loaded) is not type(config):
            raise TypeError(f"its configuration would be a {type(loaded).__name__}")
        converted_model(kind, family)(loaded).new_cache()
