"""The converted heads of a model: how far from softmax, and how much comes from the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn.conversion.layer import (
    Attending,
    ConvertedLayer,
    converted_layers,
    substituted,
)
from softmax_rnn.conversion.objectives import relative_errors


def state_off(what: Attending) -> Tensor:
    """A substitute: the window (and first keys) alone, without the state."""
    return what.converted(outside_scale=_factor(what, 0.0))


def window_off(what: Attending) -> Tensor:
    """A substitute: the state alone; where no key is outside the window, the window."""
    return what.converted(outside_scale=_factor(what, math.inf))


def has_both(model: PreTrainedModel) -> bool:
    """Whether a converted layer has a window and a state."""
    return any(layer.spec.outside == "series" for layer in converted_layers(model))


@torch.no_grad()
def along_source(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    compare: Callable[[Attending, Tensor], None],
    progress: Callable[[float], None],
) -> None:
    """Pass rows through the source of a converted model, and ``compare`` each converted layer.

    ``compare`` takes what a layer is about to compute, and the output of softmax, with which the
    model goes on.
    """
    calls, of_all = 0, len(rows) * len(converted_layers(model))

    def attend(what: Attending) -> Tensor:
        nonlocal calls
        calls += 1
        expected = what.source()
        compare(what, expected)
        progress(calls / of_all)
        return expected

    with substituted(model, attend):
        for ids in rows:
            model.base_model(input_ids=ids.unsqueeze(0).to(model.device), use_cache=False)


def converted_heads(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    progress: Callable[[float], None] = lambda share: None,
) -> pd.DataFrame:
    """One row per converted layer and head.

    Columns: ``layer``, ``head``, ``error`` (the squared error of the head's output over its
    squares, against softmax of the same queries and keys, mean over rows), and for a layer with
    window and state also ``error_state_off`` (without its state) and ``state_share`` (the share of
    the state in the sum of the weights, mean over the tokens with a key outside the window;
    missing where a norm or a sink follows the sums).

    Every layer has the inputs that softmax in the layers before it gives.

    Args:
        model: a converted model.
        rows: rows of token ids [T], of equal lengths.
        progress: called with the share that is done, after each layer of each row.
    """
    model.eval()
    sums: dict[ConvertedLayer, dict[str, Tensor]] = {x: {} for x in converted_layers(model)}

    def compare(what: Attending, expected: Tensor) -> None:
        found = what.converted()
        measured = {"error": relative_errors(found, expected)[0]}
        if what.layer.spec.outside == "series":
            window, state = state_off(what), window_off(what)
            measured["error_state_off"] = relative_errors(window, expected)[0]
            measured["state_share"] = _share(what.layer, found, window, state)
        total = sums[what.layer]
        for name, value in measured.items():
            total[name] = total.get(name, 0.0) + value.double().cpu()

    along_source(model, rows, compare, progress)
    return pd.concat(
        pd.DataFrame(
            {
                "layer": layer.record.index,
                "head": range(layer.record.num_heads),
                **{name: (total / len(rows)).numpy() for name, total in found.items()},
            }
        )
        for layer, found in sums.items()
    ).reset_index(drop=True)


def _factor(what: Attending, value: float) -> Tensor | None:
    """A factor per head of the weights outside the window; ``None`` without a window and state."""
    if what.layer.spec.outside != "series":
        return None
    return what.query.new_full((what.query.shape[1],), value)


def _share(layer: ConvertedLayer, both: Tensor, window: Tensor, state: Tensor) -> Tensor:
    """The mean share [H] of the state in the sums of weights, from three outputs [1, T, H, E].

    With one denominator, ``both = (1 - share) * window + share * state``.
    """
    spec, options = layer.spec, layer.options
    row_sum = spec.row_sum
    if row_sum is None or not row_sum.plain or spec.norm != "none" or options.merged_norm:
        return both.new_full((both.shape[2],), torch.nan)
    between = (state - window).double()
    size = between.square().sum(-1)
    share = ((both - window).double() * between).sum(-1) / size
    assert spec.window is not None
    outside = torch.arange(both.shape[1], device=both.device) >= spec.window + spec.global_keys
    known = outside[:, None] & (size > 0)
    return (share.masked_fill(~known, 0.0).sum(1) / known.sum(1))[0]  # NaN if none is known
