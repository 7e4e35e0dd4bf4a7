"""The loss of any causal language model on held-out text or on a synthetic task.

Bits per byte make models with different tokenizers comparable. They are the sum of all losses, in
bits, divided by the bytes of text that the predicted tokens stand for
(:func:`softmax_rnn.data.text_bytes.text_bytes`). The first token of a block is not predicted, so
neither its loss nor its bytes count. An end-of-text token has a loss, but no bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel

from softmax_rnn._utils.errors import differences
from softmax_rnn._utils.progress import notice
from softmax_rnn.data import is_task
from softmax_rnn.data.text_bytes import text_bytes
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training import RunConfig
from softmax_rnn.training.config import Precision, TrainingConfig
from softmax_rnn.training.folder import corpus_identity
from softmax_rnn.training.losses import TokenLosses, autocast, token_losses
from softmax_rnn.training.matmul import widest_float32_products
from softmax_rnn.training.opening import OpenedModel
from softmax_rnn.training.run import load_rows, run_tokenizer

BUCKETS = 8  # of positions, spaced logarithmically
_LONGEST = 1024  # default tokens per block of a model from elsewhere

Row = dict[str, Tensor]
Floats = NDArray[np.float64]


def losses(
    model: PreTrainedModel,
    rows: Dataset[Row] | Sequence[Row],
    *,
    batch_size: int = 1,
    precision: Precision = "fp32",
    progress: Callable[[int], None] = lambda done: None,
) -> TokenLosses:
    """The loss of every token of every row.

    Args:
        model: any causal language model; it is set to evaluation mode, and not moved.
        rows: as :class:`softmax_rnn.data.Rows`, or a list of such rows: ``input_ids`` and
            ``labels`` [T] (-100 where nothing is predicted), and ``attention_mask`` if there is
            padding.
        batch_size: rows per forward pass.
        precision: as that of a run; by default the model computes in its own dtype.
        progress: called with the number of rows that are done.

    Returns:
        Tensors [N, T - 1] on the CPU.

    Raises:
        ValueError: if a row has an id outside the model's vocabulary, or is too long for the model.
        FloatingPointError: if a loss is not finite.
    """
    model.eval()
    vocabulary = model.get_input_embeddings().num_embeddings
    found: list[TokenLosses] = []
    done = 0
    for batch in DataLoader(cast("Dataset[Row]", rows), batch_size):
        ids = batch["input_ids"]
        if int(ids.max()) >= vocabulary:
            raise ValueError(
                f"A row holds the token {int(ids.max())}, but the model has {vocabulary} tokens: "
                "the rows were made with another tokenizer."
            )
        try:
            with autocast(model.device, precision):
                part = token_losses(model, {key: x.to(model.device) for key, x in batch.items()})
        except IndexError as error:  # of a table of positions
            raise ValueError(
                f"The model cannot read rows of {ids.shape[1]} tokens ({error}): choose a smaller "
                "block_size."
            ) from error
        finite = part.losses.isfinite().all(1)
        if not finite.all():
            row = done + int(finite.int().argmin())
            raise FloatingPointError(f"The loss of a token of row {row} is not finite.")
        found.append(TokenLosses(*(x.cpu() for x in part)))
        done += len(ids)
        progress(done)
    return TokenLosses(*map(torch.cat, zip(*found, strict=True)))


@dataclass(frozen=True)
class Evaluation:
    """The losses of a model on the rows of a test split.

    Attributes:
        config: the settings of the rows: corpus, block size.
        tokenizer: the tokenizer's name; ``None`` for a synthetic task.
        found: of every row and token.
        bytes: of the text of every token [N, T - 1]; ``None`` for a synthetic task.
        ends: whether it is an end-of-text token [N, T - 1].
        end_of_text: that token; ``None`` for a synthetic task.
        rows_of_split: number of rows in the whole split.
    """

    config: TrainingConfig
    tokenizer: str | None
    found: TokenLosses
    bytes: NDArray[np.int64] | None
    ends: NDArray[np.bool_]
    end_of_text: str | None
    rows_of_split: int

    def summary(self) -> dict[str, Any]:
        """All figures as plain data; losses in nats per token.

        A standard error takes the rows as a sample of independent ones; it is missing for a single
        row. ``positions`` has the loss of the tokens that have ``from`` to ``to`` tokens before
        them in their row.
        """
        losses, right, predicted = (x.double().numpy() for x in self.found)
        loss, error = _mean(losses, predicted)
        accuracy, accuracy_error = _mean(right, predicted)
        summary = {
            "corpus": self.config.corpus,
            "tokenizer": self.tokenizer,
            "block_size": predicted.shape[1] + 1,
            "rows": len(predicted),
            "rows_of_split": self.rows_of_split,
            "tokens": int(predicted.sum()),
            "loss": loss,
            "loss_standard_error": error,
            "perplexity": math.exp(loss) if loss < 700 else None,  # a float's limit is exp(709)
            "accuracy": accuracy,
            "accuracy_standard_error": accuracy_error,
            "positions": self._positions(losses, predicted),
        }
        if self.bytes is not None:
            count = int((self.bytes * (predicted > 0)).sum())
            ends = self.ends * predicted
            summary |= {
                "bytes": count,
                "bits_per_byte": losses.sum() / math.log(2) / count if count else None,
                "end_of_text": self.end_of_text,
                "end_of_text_tokens": int(ends.sum()),
                "end_of_text_loss": _mean(losses * ends, ends)[0] if ends.any() else None,
            }
        return summary

    def _positions(self, losses: Floats, predicted: Floats) -> list[dict[str, Any]]:
        length = predicted.shape[1]
        edges = np.unique(np.geomspace(1, length + 1, min(BUCKETS, length) + 1).round().astype(int))
        rows = []
        for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            here = slice(first - 1, end - 1)
            if count := int(predicted[:, here].sum()):
                loss, error = _mean(losses[:, here], predicted[:, here])
                about = {"from": first, "to": end - 1, "tokens": count}
                rows.append({**about, "loss": loss, "loss_standard_error": error})
        return rows

    def table(self) -> RenderableType:
        """Two tables for the terminal: all figures, and the loss by position."""
        found = self.summary()
        unit = "blocks" if self.config.packing == "blocks" and self.bytes is not None else "rows"
        held_out = f"{found['rows']:,} of {found['rows_of_split']:,} {unit} of the test split"
        rows = [
            ("tokens", f"{found['tokens']:,}", f"{held_out}, each of {found['block_size']}"),
            ("loss", *_shown(found, "loss", " nats per token")),
            ("perplexity", _or_dash(found["perplexity"]), ""),
            ("accuracy", *_shown(found, "accuracy", "")),
        ]
        if found.get("bits_per_byte") is not None:
            text = f"{found['bytes']:,} bytes of text"
            rows.insert(3, ("bits per byte", f"{found['bits_per_byte']:.4f}", text))
        if found.get("end_of_text_tokens"):
            about = f"the loss of {found['end_of_text_tokens']:,} ends of texts"
            rows.append((found["end_of_text"], f"{found['end_of_text_loss']:.4f}", about))
        first = terminal_table((found["corpus"], "", " "), rows, left=(found["corpus"], " "))
        second = terminal_table(
            ("tokens before", "loss", "standard error", "tokens"),
            (
                [
                    _range(bucket["from"], bucket["to"]),
                    f"{bucket['loss']:.4f}",
                    _or_dash(bucket["loss_standard_error"]),
                    f"{bucket['tokens']:,}",
                ]
                for bucket in found["positions"]
            ),
        )
        return Group(first, second)


@widest_float32_products()
def evaluate(
    opened: OpenedModel,
    *,
    blocks: int | None = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> Evaluation:
    """The losses of a model on the held-out split of a corpus, or on a synthetic task.

    Args:
        opened: the model, as :func:`softmax_rnn.training.opening.open_model` returns it.
        blocks: how many blocks of the split to read, spread evenly over it; by default all.
        batch_size: blocks per forward pass; by default the run's batch size, else 1.
        progress: called with the numbers of blocks done and to do.
        settings: fields of :class:`~softmax_rnn.training.RunConfig` that replace those of the run,
            if they are not ``None``. A model from elsewhere needs ``corpus``; its default
            ``block_size`` is its number of positions, at most 1,024.

    Raises:
        ValueError: for invalid settings, a missing or invalid corpus, or rows that do not fit the
            model.
        FloatingPointError: if a loss is not finite.
    """
    for name, value in (("blocks", blocks), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be an integer >= 1, not {value!r}.")
    config = _config(opened, settings)
    corpus, _, split = load_rows(config)
    if opened.run is not None and not _given(settings):
        changed = differences(opened.run.corpus, corpus_identity(corpus.manifest))
        if changed:
            notice(
                f"The corpus {config.corpus!r} has changed since the run was trained ({changed}): "
                "the model may have been trained on text of this test split."
            )
    count = len(split) if blocks is None else min(blocks, len(split))
    chosen = np.linspace(0, len(split) - 1, count).round().astype(int).tolist()
    rows = Subset(split, chosen)
    found = losses(
        opened.model,
        rows,
        batch_size=batch_size or (1 if opened.run is None else config.batch_size),
        precision=config.precision,
        progress=lambda done: progress(done, count),
    )
    if not found.predicted.any():
        raise ValueError(f"These rows of {config.corpus!r} have no token to predict.")
    ids = np.stack([rows[place]["input_ids"].numpy() for place in range(count)])
    tokenizer = run_tokenizer(config)
    return Evaluation(
        config=config,
        tokenizer=None if is_task(config.corpus) else tokenizer.name_or_path,
        found=found,
        bytes=None if is_task(config.corpus) else text_bytes(tokenizer, ids),
        ends=ids[:, 1:] == tokenizer.eos_token_id,
        end_of_text=tokenizer.eos_token,
        rows_of_split=len(split),
    )


def _config(opened: OpenedModel, settings: dict[str, Any]) -> TrainingConfig:
    given = _given(settings)
    if opened.run is not None:
        return dataclasses.replace(opened.run.config, tensorboard=False, wandb=False, **given)
    if "corpus" not in given:
        raise ValueError("This model is not a run's, so it needs corpus=NAME.")
    known = getattr(opened.model.config.get_text_config(), "max_position_embeddings", None)
    return RunConfig(
        **{
            "tokenizer": opened.tokenizer_name,
            "block_size": min(known or _LONGEST, _LONGEST),
            "precision": "fp32",
            **given,
        }
    )


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _mean(values: Floats, counts: Floats) -> tuple[float, float | None]:
    """The mean over all tokens, and its standard error over rows (that of a ratio of two sums)."""
    sums, sizes = values.sum(1), counts.sum(1)
    mean, rows = sums.sum() / sizes.sum(), len(sums)
    if rows == 1:
        return float(mean), None
    spread = np.square(sums - mean * sizes).sum() * rows / (rows - 1)
    return float(mean), float(np.sqrt(spread) / sizes.sum())


def _shown(found: dict[str, Any], name: str, unit: str) -> tuple[str, str]:
    error = found[f"{name}_standard_error"]
    return f"{found[name]:.4f}", ("" if error is None else f"± {error:.4f}") + unit


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"
