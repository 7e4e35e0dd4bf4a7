"""Which powers of exp's series the heads of a trained model use, measured on text.

Softmax attention is a sum of RNNs, one per power of the score (section 3.1 of "On the
Expressiveness of Softmax Attention: A Recurrent Neural Network Perspective", Mongaras and Larson,
2025). Figure 5 of the paper trains models with more and more powers. This module measures, in a
trained model, how large each power's term is on real text, and how many powers a head needs.

Softmax is the same if a number ``c_t`` is subtracted from all scores of a row; a series is not. Yet
subtracting it takes no larger state: ``sum_n a_n (s - c_t)^n`` is a polynomial of the same order in
``s``, with coefficients that depend on the row, so the sums over keys are the same and only what a
query reads from them changes. The coefficients ``a_n`` may depend on the row as well. So a head's
effective order is that of nearly the best such polynomials: for each row, exp's Chebyshev series on
the range of its scores. A single polynomial for all rows, fitted to the widest range, needs an
order that is higher by 2 to 4 on the heads of a small trained model. The effective order describes
a head; a recurrent model would have to predict the ranges, which are not in its state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn.analysis.heads.inputs import HeadInputs, attention_layers, observed
from softmax_rnn.analysis.heads.result import Analysis
from softmax_rnn.analysis.heads.terms import LayerTerms
from softmax_rnn.training import RunConfig
from softmax_rnn.training.opening import open_model
from softmax_rnn.training.run import load_rows

MAX_ORDER = 128  # the highest order that is tried by default
_BLOCK_SIZE = 1024  # of a model outside a run, unless it has fewer positions


def analyze(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    order: int = 10,
    tolerance: float = 1e-2,
    max_order: int = MAX_ORDER,
    progress: Callable[[float], None] = lambda done: None,
) -> Analysis:
    """Measure the powers of exp's series in every head of a decoder, on text.

    The scores are the head's own: ``s = scale * phi(q_t) . phi(k_s)`` after rotary positions, with
    the clamp of its spec. The values are multiplied by its input gate, if it has one. Decays and
    windows are the head's own: the weights of softmax and of every series are multiplied by the
    same decay, and hidden keys count nowhere. The terms are those of *exp's* series of these
    scores, whatever series and denominator the head itself uses (Taylor, a single power, a length;
    with ``outside="series"`` also inside the window, whose queries and keys count everywhere). The
    errors are those of attention by a series of each order, divided by its row sum, against the
    softmax of these scores.

    A sink, or a constant added to the row sum, reduces the shares of the weights, but is not in the
    errors. A model of another family has the scores of its own attention: after its query and key
    norms and positions, with its scale, grouped queries, sliding windows and sinks.

    The shift of a row is the middle of its scores: then the largest ``|s - c|`` is as small as
    possible, and with it the bound of the Taylor remainder. On trained heads, the mean of the
    scores needs about the same order, and the maximum a much higher one. Keys that a decay has
    faded, but not to 0, count in the range like others; in a head with strong decays the shift can
    thus increase the order.

    Scores are computed in float32 (float64 for a float64 model), everything after that in float64.
    This is precise enough for rows whose largest score is above about -16. In a row far below that,
    float64 cannot resolve the Taylor sum at any order.

    Args:
        model: of this package, converted, or of any family that :func:`softmax_rnn.convert` takes.
        ids: token ids [N, T].
        mask: [N, T], 0 where a token is padding, which is neither query nor key; ``None`` for no
            padding.
        order: the highest power to report.
        tolerance: the relative error of the output that the orders allow, mean over rows.
        max_order: the highest order to try; at least ``order`` is tried.
        progress: called with the share of the work that is done.

    Raises:
        ValueError: for invalid ids, mask or options, or a model whose attention this library does
            not compute; the message names it.
        FloatingPointError: if a score is not finite.
    """
    for name, value in (("order", order), ("max_order", max_order)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0, not {value!r}.")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be a finite number > 0, not {tolerance!r}.")
    max_order = max(order, max_order)
    found: dict[int, LayerTerms] = {}
    counted = 0  # calls of layers, over all sequences

    def add(layer: int, inputs: HeadInputs) -> None:
        nonlocal counted
        if layer not in found:
            found[layer] = LayerTerms(layer, inputs.q, order, max_order, most_pairs)
        found[layer].add(inputs)
        counted += 1
        progress(counted / (len(ids) * len(layers)))

    with torch.no_grad(), ExitStack() as undo:
        layers = undo.enter_context(attention_layers(model))
        ids, shown = _checked(ids, mask, model.config.vocab_size)
        lengths = shown.sum(1)
        most_pairs = int((lengths * (lengths + 1) // 2).sum())
        undo.callback(model.train, model.training)
        model.eval()
        for index, row in enumerate(shown):
            with observed(layers, add, row):
                # One sequence at a time, and no logits, to limit memory.
                model.base_model(
                    input_ids=ids[index : index + 1].to(model.device),
                    attention_mask=row[None].to(model.device, torch.long),
                    use_cache=False,
                )
    tokens = int(lengths.sum())
    frames = [found[layer].frames(tokens, tolerance) for layer in sorted(found)]
    return Analysis(
        heads=pd.concat([heads for heads, _ in frames], ignore_index=True),
        powers=pd.concat([powers for _, powers in frames], ignore_index=True),
        specs={layer: layers[layer].spec for layer in sorted(found)},
        order=order,
        tolerance=tolerance,
        max_order=max_order,
        tokens=tokens,
    )


def analyze_checkpoint(
    source: Path | str,
    *,
    blocks: int = 16,
    block_size: int | None = None,
    corpus: str | None = None,
    **options: Any,
) -> Analysis:
    """Apply :func:`analyze` to a saved model, on a corpus's test split.

    Args:
        source: the folder of a run (its newest intact checkpoint is used), of one of its
            checkpoints or of a saved model; a GGUF file; or ``hf:owner/name``.
        blocks: number of test blocks, spread evenly over the split; all if it has fewer.
        block_size: tokens per block; by default the run's, or for a model outside a run 1024 (fewer
            if it has fewer positions).
        corpus: the corpus; by default the run's own. A model outside a run needs one; the model's
            tokenizer prepares it.
        options: options of :func:`analyze`: ``order``, ``tolerance``, ``max_order``.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: for invalid options or an invalid corpus, a model that :func:`analyze` refuses,
            or a damaged checkpoint.
        ModuleNotFoundError: for a GGUF file, if the package ``gguf`` is missing.
    """
    for name, value in (("blocks", blocks), ("block_size", block_size)):
        optional = name == "block_size" and value is None
        if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer >= 1, not {value!r}.")
    model, _, run, tokenizer = open_model(str(source))
    if run is None and corpus is None:
        raise ValueError(f"{source} is not the folder of a run, so a corpus must be given.")
    positions = getattr(model.config, "max_position_embeddings", None)
    if block_size is not None and positions is not None and block_size > positions:
        raise ValueError(f"block_size must be at most the {positions} positions of this model.")
    if run is not None:
        config = run.config
    else:
        size = min(_BLOCK_SIZE, positions or _BLOCK_SIZE)
        config = RunConfig(tokenizer=tokenizer, block_size=size)
    changed: dict[str, Any] = {"corpus": corpus, "block_size": block_size}
    changed = {name: value for name, value in changed.items() if value is not None}
    _, _, split = load_rows(dataclasses.replace(config, packing="blocks", **changed))
    chosen = np.linspace(0, len(split) - 1, min(blocks, len(split))).round().astype(int)
    ids = torch.stack([split[index]["input_ids"] for index in chosen])
    mask = torch.arange(ids.shape[1]) < torch.from_numpy(split.lengths(chosen))[:, None]
    with ProgressBar(f"Measuring {source}", total=1.0) as bar:
        return analyze(model, ids, mask=mask, progress=bar.update, **options)


def _checked(ids: Tensor, mask: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The ids, and booleans [N, T] that are false at padding."""
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"ids must be integers of shape [N, T], N and T at least 1, not {ids.dtype} of shape "
            f"{list(ids.shape)}."
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"ids must be in [0, {vocab_size - 1}] for this model; found {bad}.")
    if mask is None:
        return ids.long(), torch.ones_like(ids, dtype=torch.bool)
    if mask.shape != ids.shape:
        raise ValueError(
            f"mask must have the shape {list(ids.shape)} of ids, not {list(mask.shape)}."
        )
    shown = mask.bool()
    if not shown.any(1).all():
        raise ValueError(f"mask hides all of sequence {int((~shown.any(1)).nonzero()[0])}.")
    return ids.long(), shown
