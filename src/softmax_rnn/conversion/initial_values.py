"""Initial values of a converted attention, measured on text before any training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn.conversion.heads import along_source
from softmax_rnn.conversion.layer import Attending, ConvertedLayer, converted_layers
from softmax_rnn.conversion.objectives import relative_errors

# Logarithms of the factors that are tried for the weights outside a window.
_LOGITS = tuple(range(-12, 7))


@torch.no_grad()
def fit_initial_values(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Set the factor of the weights outside a window of each head, in place.

    Its logarithm ``outside_logit`` becomes the whole number from -12 to 6 with the least error of
    the head's output, on the source's inputs of each layer, against the source's attention. Other
    parameters keep the values with which they start: least squares for learned coefficients, for
    example, made the outputs of heads worse.

    Args:
        model: a converted model with its source's weights.
        rows: rows of token ids [T], of equal lengths.
        progress: called with the share that is done, after each layer of each row.

    Raises:
        FloatingPointError: if an error is not finite.
    """
    layers = [layer for layer in converted_layers(model) if layer.outside_logit is not None]
    if not layers:
        return
    errors: dict[ConvertedLayer, Tensor] = {}

    def compare(what: Attending, expected: Tensor) -> None:
        if what.layer in layers:
            ones = what.query.new_ones(expected.shape[2])
            found = [
                relative_errors(what.converted(outside_scale=math.exp(logit) * ones), expected)[0]
                for logit in _LOGITS
            ]
            errors[what.layer] = errors.get(what.layer, 0.0) + torch.stack(found)

    along_source(model, rows, compare, progress)
    for layer, sums in errors.items():
        if not sums.isfinite().all():
            raise FloatingPointError(f"An output of {layer.record.module} is not finite.")
        assert layer.outside_logit is not None
        best = torch.tensor(_LOGITS, device=sums.device)[sums.argmin(0)]
        # Without keys outside the window, or without weights, every factor is as good.
        layer.outside_logit.copy_(best.where(sums.amin(0) < sums.amax(0), 0))
