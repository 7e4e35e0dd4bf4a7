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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn._utils.files import write_json, write_text
from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn.analysis.terms import PERCENTILE, LayerTerms
from softmax_rnn.ops.layer import Attention
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training import RunConfig
from softmax_rnn.training.checkpoint import load_trained, model_folder
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.run import load_rows

MAX_ORDER = 128  # the highest order that is tried by default
_ORDERS = {
    "order_bound": "order by bound",
    "order_needed": "Taylor",
    "order_shifted": "shifted",
    "effective_order": "effective",
}


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`analyze`.

    Attributes:
        heads: one row per layer and head, with the columns ``layer``, ``head``, ``max_score`` (the
            largest |s|), ``p99_score`` (99th percentile of |s|), ``mean_score`` (mean of s),
            ``max_radius`` (half the range of a row's scores, the largest of all rows),
            ``order_needed`` (the lowest order whose mean ``error`` is within the tolerance; missing
            if no order up to ``max_order`` is enough), ``order_shifted`` (the same for the Taylor
            series about the middle of each row's range), ``effective_order`` (the same for the
            Chebyshev series on each row's range) and ``order_bound`` (``order_for(tolerance,
            max_score)``, the order at which every weight is within the tolerance of exp; where all
            weights of a row are small, the output needs a higher one; missing for scores above
            700).
        powers: one row per layer, head and power n, with the columns ``layer``, ``head``,
            ``power``, ``term`` (mean of |s|^n / n! over visible pairs; here and in shares, a pair
            counts as much as its decay leaves of it), ``share`` (``term`` divided by the mean of
            exp(|s|); the few largest scores dominate it), ``log10_share``, ``pair_share`` (mean
            over pairs of |s|^n / n! / exp(|s|): the size of a score does not matter),
            ``numerator`` (mean over rows of ||sum_s s^n/n! v_s|| / ||sum_s exp(s) v_s||) and
            ``error`` (mean over rows of the relative L2 error of Taylor attention of order n
            against softmax).
        spec: the attention of the model.
        order: the highest power in ``powers``.
        tolerance: tolerance of the orders.
        max_order: the highest order that was tried.
        tokens: number of tokens measured, which is the number of rows per head.
    """

    heads: pd.DataFrame
    powers: pd.DataFrame
    spec: AttentionSpec
    order: int
    tolerance: float
    max_order: int
    tokens: int

    @property
    def note(self) -> str:
        """What the numbers mean if the model's weights are not exp; else empty."""
        if self.spec.series == "exp":
            return ""
        return (
            f"This model's weights are not exp (series={self.spec.series!r}, "
            f"order={self.spec.order}): the numbers are for softmax of the same scores."
        )

    def table(self) -> Table:
        """The table for the terminal: one row per head."""
        kept = min(self.order, 2)
        powers = [*(f"power {n}" for n in range(kept + 1)), f"{kept + 1} and up"]
        scores = ("max |s|", f"{PERCENTILE}% |s|")
        otherwise = dict.fromkeys(_ORDERS, f"> {self.max_order}") | {"order_bound": "-"}
        shares = self.powers.pivot_table(
            index=["layer", "head"], columns="power", values="pair_share"
        ).to_numpy()[:, : kept + 1]
        table = terminal_table(
            ("layer", "head", *scores, *powers, *_ORDERS.values()),
            (
                [
                    *(str(head[name]) for name in ("layer", "head")),
                    *(f"{head[name]:.2f}" for name in ("max_score", "p99_score")),
                    *(f"{100 * part:.1f}%" for part in (*low, max(0.0, 1 - low.sum()))),
                    *(_or(head[name], otherwise[name]) for name in _ORDERS),
                ]
                for head, low in zip(self.heads.to_dict("records"), shares, strict=True)
            ),
        )
        table.caption = (
            f"{self.note} s: the scores on {self.tokens:,} tokens. power n: the share of "
            "|s|^n / n! in exp(|s|), mean over pairs of tokens. order by bound: of the Taylor "
            "series, enough for any scores up to max |s|. The other orders are the lowest "
            f"whose output on this text is within {self.tolerance:g} of softmax's. Taylor: of the "
            "series about 0. shifted: about the middle of each row's scores. effective: of the "
            "Chebyshev series on the range of each row's scores."
        ).lstrip()
        return table


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
    """Measure the powers of exp's series in every head of a model, on text.

    The scores are the head's own: ``s = scale * phi(q_t) . phi(k_s)`` after rotary positions, with
    the clamp of its spec. The values are multiplied by its input gate, if it has one. Decays and
    windows are the head's own: the weights of softmax and of every series are multiplied by the
    same decay, and hidden keys count nowhere. The terms are those of *exp's* series of these
    scores, whatever series and denominator the head itself uses (Taylor, a single power, a length;
    with ``outside="series"`` also inside the window, whose queries and keys count everywhere). The
    errors are those of attention by a series of each order, divided by its row sum, against the
    softmax of these scores.

    The shift of a row is the middle of its scores: then the largest ``|s - c|`` is as small as
    possible, and with it the bound of the Taylor remainder. On trained heads, the mean of the
    scores needs about the same order, and the maximum a much higher one. Keys that a decay has
    faded, but not to 0, count in the range like others; in a head with strong decays the shift can
    thus increase the order.

    Scores are computed in float32 (float64 for a float64 model), everything after that in float64.
    This is precise enough for rows whose largest score is above about -16. In a row far below that,
    float64 cannot resolve the Taylor sum at any order.

    Args:
        model: a model with :class:`softmax_rnn.ops.layer.Attention` modules.
        ids: token ids [N, T].
        mask: [N, T], 0 where a token is padding, which is neither query nor key; ``None`` for no
            padding.
        order: the highest power to report.
        tolerance: the relative error of the output that the orders allow, mean over rows.
        max_order: the highest order to try; at least ``order`` is tried.
        progress: called with the share of the work that is done.

    Raises:
        ValueError: for invalid ids, mask or options, or a model without these modules.
        FloatingPointError: if a score is not finite.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, Attention)}
    if not layers:
        raise ValueError(
            f"The model is a {type(model).__name__} without this package's attention; "
            "softmax_rnn.models.from_llama converts a Llama."
        )
    ids, shown = _checked(ids, mask, model.config.vocab_size)
    for name, value in (("order", order), ("max_order", max_order)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0, not {value!r}.")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be a finite number > 0, not {tolerance!r}.")
    max_order = max(order, max_order)
    lengths = shown.sum(1)
    found = [LayerTerms(name, layer, order, max_order, shown) for name, layer in layers.items()]

    counted = 0  # calls of layers, over all sequences

    def visit(layer: LayerTerms) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            nonlocal counted
            hidden = args[0] if args else given["hidden_states"]
            positions = args[1] if len(args) > 1 else given.get("position_embeddings")
            layer.add(hidden, positions, shown[counted // len(found)].to(hidden.device))
            counted += 1
            progress(counted / (len(ids) * len(found)))

        return hook

    with torch.no_grad(), ExitStack() as undo:
        undo.callback(model.train, model.training)
        model.eval()
        for layer in found:
            hook = layer.module.register_forward_pre_hook(visit(layer), with_kwargs=True)
            undo.callback(hook.remove)
        for index in range(len(ids)):
            # One sequence at a time, and no logits, to limit memory.
            model.base_model(
                input_ids=ids[index : index + 1].to(model.device),
                attention_mask=shown[index : index + 1].to(model.device, torch.long),
                use_cache=False,
            )
    tokens = int(lengths.sum())
    frames = [layer.frames(index, tokens, tolerance) for index, layer in enumerate(found)]
    return Analysis(
        heads=pd.concat([heads for heads, _ in frames], ignore_index=True),
        powers=pd.concat([powers for _, powers in frames], ignore_index=True),
        spec=found[0].module.spec,
        order=order,
        tolerance=tolerance,
        max_order=max_order,
        tokens=tokens,
    )


def analyze_checkpoint(
    path: Path, *, blocks: int = 16, corpus: str | None = None, **options: Any
) -> Analysis:
    """Apply :func:`analyze` to a saved model, on the test split of its run's corpus.

    Args:
        path: folder of a run (its newest intact checkpoint is used), of one of its checkpoints, or
            of a saved model.
        blocks: number of test blocks, spread evenly over the split; all if it has fewer.
        corpus: another corpus to measure on; required for a model outside a run.
        options: options of :func:`analyze`: ``order``, ``tolerance``, ``max_order``.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: for invalid options or an invalid corpus, a model of another kind, or a damaged
            checkpoint.
    """
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise ValueError(f"blocks must be an integer >= 1, not {blocks!r}.")
    folder = model_folder(path)
    run = next((run for run in map(RunFolder, (path, folder.parent)) if run.exists), None)
    if run is None and corpus is None:
        raise ValueError(f"{path} is not the folder of a run, so a corpus must be given.")
    model = load_trained(folder)
    if run is not None:
        config = run.config
    else:
        length = model.config.max_position_embeddings
        config = RunConfig(tokenizer=str(folder), block_size=length)
    if corpus is not None:
        config = dataclasses.replace(config, corpus=corpus)
    _, _, split = load_rows(dataclasses.replace(config, packing="blocks"))
    chosen = np.linspace(0, len(split) - 1, min(blocks, len(split))).round().astype(int)
    ids = torch.stack([split[index]["input_ids"] for index in chosen])
    with ProgressBar(f"Measuring {folder}", total=1.0) as bar:
        return analyze(model, ids, progress=bar.update, **options)


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """Write ``analysis_heads.csv``, ``analysis_powers.csv`` and ``analysis.json`` (settings)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"analysis{end}" for end in ("_heads.csv", "_powers.csv", ".json")]
    write_text(paths[0], analysis.heads.to_csv(index=False))
    write_text(paths[1], analysis.powers.to_csv(index=False))
    settings = {name: getattr(analysis, name) for name in ("order", "tolerance", "max_order")}
    data = {"spec": analysis.spec.to_dict(), **settings, "tokens": analysis.tokens}
    write_json(paths[2], data)
    return paths


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


def _or(value: Any, otherwise: str) -> str:
    return otherwise if pd.isna(value) else str(value)
