"""An attention of this library inside the attention module of another family.

The family's module projects, rotates and caches queries, keys and values, and then calls the
function that transformers' ``AttentionInterface`` has under the name ``CONVERTED``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from softmax_rnn import attention
from softmax_rnn.conversion.cache import KeyValueLayer, StateLayer, with_earlier
from softmax_rnn.conversion.record import ConvertedAttention
from softmax_rnn.conversion.rotations import NO_POSITIONS, inverse_of, unrotated
from softmax_rnn.models.masks import mask_of_family, segments_shown
from softmax_rnn.ops import (
    AttentionCore,
    LayerOptions,
    Mapped,
    Projected,
    Segments,
    is_per_key,
    key_widths,
    require_first_keys,
    segments_of,
)

CONVERTED = "softmax_rnn_converted"  # the attention's name in transformers, and the model type
PROBE = "softmax_rnn_probe"  # the one of probe.py, which notes its calls
PART = "softmax_rnn"  # the name of the submodule in each attention module
INPUTS = "softmax_rnn_inputs"  # the keyword by which an attention module hands these through

# Arguments of an attention that no spec of this library computes.
UNSUPPORTED = {
    "softcap": "a soft cap of the scores",
    "position_bias": "a bias of the scores by relative positions",
    "head_mask": "a mask of heads",
    "indices": "a choice of keys by an indexer",
}


class _Inputs(NamedTuple):
    """What the interface of transformers does not pass."""

    hidden_states: Tensor
    cache: Cache | None
    position_embeddings: Any = None


@dataclass(frozen=True, eq=False)
class Attending:
    """What a converted layer is about to compute, for a substitute.

    Attributes:
        layer: the layer.
        query: [B, H, T, D], rotated.
        key: [B, Hkv, T, D], rotated.
        value: [B, Hkv, T, E].
        inputs: the hidden states.
        sinks: the family's sinks [H].
        visible: ``mask`` and ``causal``, as the operation takes them.
        segments: integers [B or 1, T] of packed sequences; ``None`` for one in a row.
    """

    layer: ConvertedLayer
    query: Tensor
    key: Tensor
    value: Tensor
    inputs: _Inputs
    sinks: Tensor | None
    visible: dict[str, Any]
    segments: Tensor | None = None

    def converted(self, **options: Any) -> Tensor:
        """The converted attention [B, T, H, E]; ``options`` replace arguments of the operation."""
        return self.layer.converted(self, None, **options)

    def source(self) -> Tensor:
        """The source's attention, softmax, [B, T, H, E]."""
        tensors, spec = (self.query, self.key, self.value), self.layer.source_spec
        options = {"sink": self.sinks, "segments": self.segments, **self.visible}
        return attention(*tensors, spec, **options).transpose(1, 2)

    def parts(self, segments: Segments) -> list[Attending]:
        """The same for each batch of segments."""
        causal = self.visible["causal"]
        parts = zip(
            *(segments.split(x, 2) for x in (self.query, self.key, self.value)),
            segments.split(self.inputs.hidden_states, 1),
            segments.split_all(self.inputs.position_embeddings, 1),
            segments.split_mask(None, causal),
            strict=True,
        )
        return [
            Attending(
                *(self.layer, q, k, v, _Inputs(x, None, rotary), self.sinks),
                {"mask": mask, "causal": causal},
            )
            for q, k, v, x, rotary, mask in parts
        ]


Substitute = Callable[[Attending], Tensor]  # returns the output that the model goes on with


class ConvertedLayer(AttentionCore):
    """The submodule of an attention module: what its spec and options need, and the computation.

    ``substitute`` replaces the computation for a while; see :func:`substituted`. With
    ``window_dropped`` a layer in training sees its state alone where a key is in it, and not its
    window: an attribute, since gradient checkpointing computes the layer once more later.
    """

    substitute: Substitute | None = None
    window_dropped = False

    def __init__(self, record: ConvertedAttention) -> None:
        super().__init__(record.spec, record.options)
        record.check()
        self.record = record
        # Reading a record takes longer than computing a token.
        self.source_spec = record.source_spec
        heads = record.num_heads, record.num_kv_heads
        self.add_parts(record.hidden_size, *heads, record.key_width, record.value_width)
        if record.scaled_by_family:  # the number is that of the width inside the window
            width = key_widths(self.spec, self.options, record.key_width)[1]
            self.far_factor = (record.key_width / (width or record.key_width)) ** 0.5
        self._turns = self.options.map_before_rotary and record.rotation != NO_POSITIONS
        if record.sinks:  # the family's parameter
            self.sink = None

    def attach(self, module: nn.Module) -> RemovableHandle:
        """Become the submodule of ``module`` that computes its attention; return its hook."""
        module.add_module(PART, self)
        return module.register_forward_pre_hook(pass_inputs, with_kwargs=True)

    @property
    def is_source(self) -> bool:
        """Whether it computes the source's attention."""
        return self.spec == self.source_spec and self.options == LayerOptions()

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, inputs: _Inputs, cache: Any = None
    ) -> Projected:
        """What the operation takes; arguments as in :meth:`forward`, with this layer's cache."""
        tokens, unrotated_q, unrotated_k = query.shape[2], None, None
        if self.options.map_before_rotary:
            unrotated_q, unrotated_k = (
                unrotated(x, inputs.position_embeddings, self.record.rotation)
                for x in (query, key[:, :, key.shape[2] - tokens :])
            )
        log_decay, gate = self.decay_and_gate(inputs.hidden_states, key.dtype)
        fixed = log_decay if log_decay is not None and log_decay.ndim == 1 else None
        per_key = (None if fixed is not None else log_decay), gate, unrotated_k
        log_decay, gate, unrotated_k = with_earlier(per_key, key, tokens, cache)
        log_decay = log_decay if fixed is None else fixed
        state = cache.state if isinstance(cache, StateLayer) else None
        start = 0 if state is None else int(state.tokens)
        q, k, *outside = self._mapped(query, key, start, unrotated_q, unrotated_k)
        gated = value if gate is None else value * gate.unsqueeze(-1)
        ungated = value[:, :, value.shape[2] - query.shape[2] :]
        return Projected(q, k, gated, log_decay, ungated, None, *outside)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        inputs: _Inputs,
        causal: bool,
        sinks: Tensor | None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [B, H, T, D], rotated.
            key: [B, Hkv, S, D]; the last T are those of the queries.
            value: [B, Hkv, S, E].
            mask: ``None``, [B, 1, 1, S] for causal attention to some keys, or [B, 1, T, S].
            inputs: the hidden states [B, T, hidden_size] of the new tokens, and the cache.
            causal: whether a query sees no later key, if there is no mask.
            sinks: the family's sinks [H].
            segments: integers [B or 1, T] of packed sequences, in place of a mask.

        Returns:
            [B, T, H, E].
        """
        cache = None
        if inputs.cache is not None and self.record.index < len(inputs.cache.layers):
            cache = inputs.cache.layers[self.record.index]
        if segments is not None:
            mask = None
        mask, causal = self._visible(mask, query, key, causal, cache)
        given = mask, segments, sinks, self.substitute
        plain = all(x is None for x in given)
        if plain and isinstance(cache, StateLayer) and not cache.record_past:
            found = self.next_token(
                *(query, key, value, cache.state),
                functools.partial(self._inverse, query, inputs) if self._turns else None,
            )
            if found is not None:
                out, cache.state = found
                return out.transpose(1, 2)
        device = query.device.type
        if torch.is_autocast_enabled(
            device
        ):  # rotary positions may be in another dtype than values
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        visible = {"mask": mask, "causal": causal}
        what = Attending(self, query, key, value, inputs, sinks, visible, segments)
        if self.substitute is None:
            out = self.converted(what, cache)
            if isinstance(cache, KeyValueLayer):
                of_keys = mask is not None and is_per_key(mask) and not self.record.sliding_window
                cache.forget(mask if of_keys and self.spec.hiding_window else None)
            return out
        if isinstance(cache, StateLayer | KeyValueLayer) or key.shape[2] != query.shape[2]:
            raise ValueError(
                "A converted attention can be substituted only without a cache: use_cache=False."
            )
        return self.substitute(what)

    def _inverse(self, query: Tensor, inputs: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """What takes off the rotation of a token."""
        kind = query.device, query.dtype
        return inverse_of(
            self.record.rotation, inputs.position_embeddings, 1, query.shape[3], *kind
        )

    def converted(self, what: Attending, cache: Any, **options: Any) -> Tensor:
        """The attention of the layer's spec; ``options`` are arguments of :meth:`attend`."""
        if what.segments is not None:
            segments = segments_of(what.segments, len(what.query))
            parts = [self.converted(part, None, **options) for part in what.parts(segments)]
            return segments.join(parts, 1)
        inputs, options = what.inputs, {**what.visible, **options}
        if self.window_dropped and self.training and cache is None:
            assert self.outside_logit is not None
            # Not a constant: on several processes each parameter needs a gradient.
            options.setdefault("outside_scale", self.outside_logit * 0 + math.inf)
        projected = self.project(what.query, what.key, what.value, inputs, cache)
        if what.sinks is not None:
            options["sink"] = what.sinks
        recurrent = isinstance(cache, StateLayer)
        attend = functools.partial(cache.attend, self) if recurrent else self.attend
        out = attend(inputs.hidden_states, projected, **options)
        return self.join(out).unflatten(-1, (out.shape[1], out.shape[3]))

    def _visible(
        self, mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, cache: Any
    ) -> tuple[Tensor | None, bool]:
        """The mask for the keys at hand, and whether the operation has to hide later ones."""
        keys = key.shape[2]
        if self.spec.positional and cache is not None and not isinstance(cache, StateLayer):
            seen = cache.get_seq_length()
            if not isinstance(seen, int) or seen < keys:
                raise ValueError(
                    f"A {type(cache).__name__} has unused keys after the newest "
                    "one, but with a decay or a window the newest key must be the last: use "
                    "model.new_cache()."
                )
        if isinstance(cache, KeyValueLayer) and cache.shown is not None:
            mask = cache.mask(mask, query.shape[2])
        if mask is None:
            return None, causal
        if mask.dtype != torch.bool or mask.ndim != 4:
            raise ValueError(
                "The attention mask must be boolean (True = visible), [B, T] or [B, 1, T, S], not "
                f"{mask.dtype} of shape {list(mask.shape)}: an additive one could hold a bias, "
                "which a converted attention does not have."
            )
        mask = mask[..., mask.shape[-1] - keys :]  # a cache may have dropped the first
        known = isinstance(cache, StateLayer) and not torch.compiler.is_compiling()
        if known and mask.is_cpu and mask.shape[-2] == keys == 1 and mask.all():
            return None, causal  # a visible token, whatever padding came before
        require_first_keys(self.spec, mask)
        if mask.shape[-2] == 1:
            return mask, True
        if mask.stride()[2:] == (0, 0):  # bidirectional, nothing hidden
            return None, False
        if mask.stride()[2] == 0:
            return mask[:, :, :1], False
        return mask, causal and self.spec.positional

    def _mapped(
        self,
        query: Tensor,
        key: Tensor,
        start: int,
        unrotated_q: Tensor | None,
        unrotated_k: Tensor | None,
    ) -> Mapped:
        """Queries and keys after the feature map; only differences of positions matter."""
        earlier = key.shape[2] - query.shape[2]
        positions = torch.arange(start, start + key.shape[2], device=key.device).unsqueeze(0)
        if earlier:  # a map takes as many queries as keys
            query = F.pad(query, (0, 0, earlier, 0))
            unrotated_q = None if unrotated_q is None else F.pad(unrotated_q, (0, 0, earlier, 0))
        before = None
        if unrotated_q is not None and unrotated_k is not None:
            before = unrotated_q, unrotated_k
        mapped = self.map_features(query, key, positions, before)
        far = mapped.outside_q
        if far is not None:
            far = far[:, :, earlier:]
            if self.far_factor != 1.0:
                far = far * self.far_factor
        return mapped._replace(q=mapped.q[:, :, earlier:], outside_q=far)


def pass_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the hidden states and the cache through the module to :func:`attend`."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", CONVERTED)
    if chosen not in (CONVERTED, PROBE):
        raise ValueError(
            f"The attention of this model was converted, but its implementation is {chosen!r}: "
            f"model.set_attn_implementation({CONVERTED!r}) brings it back."
        )
    given = (*args, *kwargs.values())
    hidden_states = args[0] if args else kwargs["hidden_states"]
    cache = next((x for x in given if isinstance(x, Cache)), None)
    cache = getattr(cache, "self_attention_cache", cache)  # of a decoder that could have an encoder
    positions = kwargs.get("position_embeddings")
    return args, {**kwargs, INPUTS: _Inputs(hidden_states, cache, positions)}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of transformers' interface.

    Raises:
        ValueError: for a module that was not converted, or what a converted one cannot compute.
    """
    layer = getattr(module, PART, None)  # or one around it, such as peft's modules_to_save
    record = getattr(layer, "record", None)
    if layer is None or not isinstance(record, ConvertedAttention):
        raise ValueError(
            f"This {type(module).__name__} was not converted: {CONVERTED!r} is the attention of "
            "models that softmax_rnn.convert returns; load saved ones with an Auto class."
        )
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"A converted attention cannot have {what} ({name}).")
    if kwargs.get("output_attentions"):
        raise ValueError("A converted attention has no matrix of weights: output_attentions=False.")
    if dropout:
        raise ValueError(
            f"A converted attention drops no weights: load the model with an attention dropout of "
            f"0, not {dropout} (attention_dropout, attn_pdrop or attention_probs_dropout_prob in "
            "the configuration), to train it."
        )
    if scaling is not None and scaling != record.scaling:
        raise ValueError(
            f"{record.module} scales its scores by {scaling}, but by {record.scaling} when it was "
            "converted."
        )
    causal = record.causal if is_causal is None else bool(is_causal)
    inputs = kwargs[INPUTS]
    cached = inputs.cache is not None
    segments = segments_shown(attention_mask, query.shape[2], causal, kwargs, cached)
    return layer(query, key, value, attention_mask, inputs, causal, s_aux, segments), None


def converted_layers(model: nn.Module) -> list[ConvertedLayer]:
    """The layers of a model whose attention is no longer the source's."""
    layers = (module for module in model.modules() if isinstance(module, ConvertedLayer))
    return [layer for layer in layers if not layer.is_source]


@contextlib.contextmanager
def substituted(model: nn.Module, substitute: Substitute) -> Iterator[None]:
    """Let ``substitute`` compute the attention of all :func:`converted_layers`."""
    before = [(layer, layer.substitute) for layer in converted_layers(model)]
    try:
        for layer, _ in before:
            layer.substitute = substitute
        yield
    finally:
        for layer, earlier in before:
            layer.substitute = earlier


def as_source(what: Attending) -> Tensor:
    """A substitute: the source's attention."""
    return what.source()


AttentionInterface.register(CONVERTED, attend)
AttentionMaskInterface.register(CONVERTED, mask_of_family)
