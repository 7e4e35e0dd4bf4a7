"""Which layers of a model keep softmax: those whose conversion changes the predictions most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn.conversion.layer import (
    PART,
    Attending,
    ConvertedLayer,
    as_source,
    converted_layers,
    substituted,
)
from softmax_rnn.conversion.rotations import NO_POSITIONS
from softmax_rnn.ops import AttentionSpec, LayerOptions


@torch.no_grad()
def divergences(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    progress: Callable[[float], None] = lambda share: None,
) -> dict[int, float]:
    """How far the predictions are from the source's if one layer alone is converted.

    Args:
        model: a converted model, whose other layers compute softmax for that time.
        rows: rows of token ids [T].
        progress: called with the share that is done.

    Returns:
        For the index of each converted layer, the divergence KL(source, model) of the next token,
        in nats, mean over all tokens.
    """
    model.eval()
    layers = converted_layers(model)
    sums = {layer.record.index: 0.0 for layer in layers}
    done, every = 0, len(rows) * (1 + len(layers))

    def predictions(ids: Tensor) -> Tensor:
        nonlocal done
        logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
        done += 1
        progress(done / every)
        return logits.float().log_softmax(-1)

    for ids in rows:
        with substituted(model, as_source):
            expected = predictions(ids)
        for layer in layers:
            with substituted(model, _alone(layer)):
                found = predictions(ids)
            total = F.kl_div(found, expected, reduction="sum", log_target=True)
            sums[layer.record.index] += float(total) / sum(map(len, rows))
    return sums


def _alone(chosen: ConvertedLayer) -> Callable[[Attending], Tensor]:
    """A substitute: softmax in every layer but one."""
    return lambda what: what.converted() if what.layer is chosen else what.source()


def costliest(found: dict[int, float], count: int) -> list[int]:
    """The ``count`` layers of the largest divergences, in order.

    Raises:
        ValueError: unless a layer is left to convert.
    """
    if not 0 < count < len(found):
        raise ValueError(
            f"auto:{count} must keep softmax in 1 to {len(found) - 1} of the {len(found)} layers."
        )
    return sorted(sorted(found, key=found.__getitem__, reverse=True)[:count])


def restore_softmax(model: PreTrainedModel, layers: Collection[int]) -> None:
    """Give these layers of a converted model the source's attention again, in place."""
    softmax: dict[str, Any] = {
        "attention": AttentionSpec().to_dict(),
        "layer_options": LayerOptions().to_dict(),
        "rotation": NO_POSITIONS,
    }
    for name, part in list(model.base_model.named_modules()):
        if isinstance(part, ConvertedLayer) and part.record.index in layers:
            module = model.base_model.get_submodule(name.removesuffix(f".{PART}"))
            setattr(module, PART, ConvertedLayer(dataclasses.replace(part.record, **softmax)))
    records = model.config.softmax_rnn["layers"]
    changed = [x | softmax if x["index"] in layers else x for x in records]
    model.config.softmax_rnn = {**model.config.softmax_rnn, "layers": changed}
