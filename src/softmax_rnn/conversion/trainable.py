"""The model of a conversion's run: pretrained, with new attention, and what is trained of it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from softmax_rnn.conversion.convert import convert, modules_to_save
from softmax_rnn.conversion.layer import ConvertedLayer, converted_layers
from softmax_rnn.conversion.lora import add_lora
from softmax_rnn.conversion.model import ConvertedModel
from softmax_rnn.ops import AttentionSpec

if TYPE_CHECKING:
    from softmax_rnn.training.config import ConversionConfig


def conversion_model(
    source: PreTrainedModel, config: ConversionConfig
) -> tuple[PreTrainedModel, str]:
    """The model of a run, made of its ``source``, in float32, and the hash of the latter's weights.

    Only what the run trains requires gradients.

    Raises:
        ValueError: as :func:`converted_source`, and if there is nothing to train.
    """
    model, identity = converted_source(source, config)
    layers = converted_layers(model)
    if config.objective == "transfer" and not modules_to_save(model):
        raise ValueError(
            f"attention={config.attention!r} has no parameters of its own: objective='transfer' "
            "has nothing to train."
        )
    if config.objective == "transfer" or config.adapted:
        model.requires_grad_(False)
    if config.adapted:
        add_lora(model, config.lora_rank, config.seed)
    for layer in layers:
        layer.requires_grad_(True)
    return model, identity


def converted_source(
    source: PreTrainedModel, config: ConversionConfig
) -> tuple[PreTrainedModel, str]:
    """The source of a run, converted in place, in float32, and the hash of its weights before.

    Raises:
        ValueError: if the source cannot be converted, has another attention already, or takes fewer
            tokens than a block has.
    """
    model = source if source.dtype == torch.float32 else source.float()
    identity = weights_hash(model)
    check_length(model, config)
    _drop_nothing(model)
    if isinstance(model, ConvertedModel):
        _check_attention(model, config)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            model = convert(model, config.spec, config.layers, config.variant.options)
    return model, identity


def check_length(model: PreTrainedModel, config: ConversionConfig) -> None:
    """Raise ``ValueError`` if the model has fewer positions than a block has tokens."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and config.block_size > most:
        raise ValueError(
            f"block_size={config.block_size} is longer than the {most} tokens that {config.source} "
            "takes."
        )


def _check_attention(model: ConvertedModel, config: ConversionConfig) -> None:
    """Raise ``ValueError`` unless the converted layers have the run's attention."""
    wanted = config.spec, config.variant.options
    parts = [part for part in model.modules() if isinstance(part, ConvertedLayer)]
    for place, part in enumerate(parts):
        chosen = config.layers is None or place in config.layers
        found = AttentionSpec.from_dict(part.record.attention), part.record.options
        if (chosen and found != wanted) or (not chosen and not part.is_source):
            raise ValueError(
                f"{config.source} is converted already, with another attention in layer {place}: "
                f"{part.spec}. Give its attention and layers, or a source that is not converted."
            )


def _drop_nothing(model: PreTrainedModel) -> None:
    """Set every dropout to 0: a converted attention has none, and a teacher should have none."""
    for owner in (model.config, *model.modules()):
        for name, value in list(vars(owner).items()):
            if "drop" in name and isinstance(value, float):
                setattr(owner, name, 0.0)
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0


def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 of all weights, by which a resumed run knows its source."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
