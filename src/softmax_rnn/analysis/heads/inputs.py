"""What the heads of each layer take of a sequence, in a model of any kind."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn.conversion.convert import softmax_layers
from softmax_rnn.conversion.layer import ConvertedLayer
from softmax_rnn.conversion.model import ConvertedModel
from softmax_rnn.ops import (
    FEATURE_MAPS,
    Attention,
    AttentionSpec,
    Projected,
    compute_dtype,
    per_key_decay,
    visible,
)

Layer = Attention | ConvertedLayer


class HeadInputs(NamedTuple):
    """What the heads of a layer take of a sequence of T tokens.

    Attributes:
        q: queries [H, T, D], after positions and feature map, times the scale of the scores.
        k: keys [H, T, D], after positions and feature map; those of a group are repeated.
        v: values [H, T, E], after the input gate.
        fading: the running sum of the log decays in float64, [H, T] or per channel [H, T, D];
            ``None`` without a decay.
        clamp: the largest score, if there is one.
        sink: [H]; its exponential is in each row's sum; ``None`` without a sink.
        seen: [T, T], which keys each query sees.
        shown: [T], false at padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    fading: Tensor | None
    clamp: float | None
    sink: Tensor | None
    seen: Tensor
    shown: Tensor

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        projected: Projected,
        shown: Tensor,
        mask: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> HeadInputs:
        """What ``spec`` takes of one projected sequence.

        Args:
            spec: the attention.
            projected: one sequence.
            shown: [T], false at padding.
            mask: further keys to hide, broadcastable to [1, 1, T, T].
            sink: [H], a learned one.
        """
        q, k = (FEATURE_MAPS[spec.feature_map](x[0]) for x in projected[:2])
        dtype, groups, tokens = compute_dtype(projected.q.dtype), len(q) // len(k), len(shown)
        fading = per_key_decay(projected.log_decay, projected.k, shown[None, None, None])
        if fading is not None:
            fading = fading[0].cumsum(1).repeat_interleave(groups, 0)
        keys = shown if mask is None else mask & shown
        window = spec.hiding_window, spec.global_keys
        seen = visible(tokens, tokens, True, keys[(None,) * (4 - keys.ndim)], q.device, *window)
        assert seen is not None
        if sink is None and spec.row_sum is not None and spec.row_sum.offset:
            sink = q.new_full((len(q),), math.log(spec.row_sum.offset))
        return cls(
            q=q.to(dtype) * spec.score_scale(q.shape[-1]),
            k=k.to(dtype).repeat_interleave(groups, 0),
            v=projected.v[0].repeat_interleave(groups, 0),
            fading=fading,
            clamp=spec.clamp,
            sink=sink,
            seen=seen[0, 0],
            shown=shown,
        )


@contextlib.contextmanager
def attention_layers(model: PreTrainedModel) -> Iterator[dict[int, Layer]]:
    """The layers that compute a model's attention within the context, by their number.

    Those of another family's model become :class:`ConvertedLayer` for that time.

    Raises:
        ValueError: for an attention that this library does not compute, as
            :func:`softmax_rnn.convert`, or that sees later tokens.
    """
    own = [module for module in model.modules() if isinstance(module, Attention)]
    if own:
        yield dict(enumerate(own))
        return
    with contextlib.ExitStack() as undo:
        if isinstance(model, ConvertedModel):
            layers = [module for module in model.modules() if isinstance(module, ConvertedLayer)]
        else:
            layers = undo.enter_context(softmax_layers(model))
        for layer in layers:
            if not layer.record.causal:
                raise ValueError(
                    f"{layer.record.module} of this {type(model).__name__} sees later tokens; only "
                    "decoders are analysed."
                )
        yield {layer.record.index: layer for layer in layers}


@contextlib.contextmanager
def observed(
    layers: dict[int, Layer], observe: Callable[[int, HeadInputs], None], shown: Tensor
) -> Iterator[None]:
    """Call ``observe`` with the number and the inputs of each layer that runs.

    Args:
        layers: of :func:`attention_layers`.
        observe: is called before the layer computes.
        shown: [T], false at padding of the sequence that the model is given.
    """

    def hook(number: int) -> Callable[..., None]:
        def run(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            inputs = _of_own if isinstance(layer, Attention) else _of_converted
            observe(number, inputs(layer, shown, *args, **given))

        return run

    with contextlib.ExitStack() as undo:
        for number, layer in layers.items():
            handle = layer.register_forward_pre_hook(hook(number), with_kwargs=True)
            undo.callback(handle.remove)
        yield


def _of_own(
    layer: Attention,
    shown: Tensor,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    *_: Any,
    **__: Any,
) -> HeadInputs:
    shown = shown.to(hidden_states.device)
    projected = layer.project(hidden_states, position_embeddings, mask=shown[None, None, None])
    return HeadInputs.of(layer.spec, projected, shown, sink=layer.sink)


def _of_converted(
    layer: ConvertedLayer,
    shown: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    inputs: Any,
    _: bool,
    sinks: Tensor | None,
    *__: Any,
) -> HeadInputs:
    projected = layer.project(query, key, value, inputs)
    sink = layer.sink if sinks is None else sinks
    return HeadInputs.of(layer.spec, projected, shown.to(query.device), mask, sink)
