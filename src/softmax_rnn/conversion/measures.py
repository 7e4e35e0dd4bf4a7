"""What is measured of the models of a conversion: losses, heads, decoding, continuations."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from softmax_rnn.analysis.evaluation import losses
from softmax_rnn.conversion.heads import converted_heads, has_both, state_off, window_off
from softmax_rnn.conversion.layer import substituted
from softmax_rnn.models.cache_sizes import cache_bytes
from softmax_rnn.report.statistics import paired_difference

_HEAD_ROWS = 4  # for the figures of heads
_LENGTHS = tuple(2**n for n in range(4, 13))  # of prompts
_TOKENS = 8  # that are decoded after each prompt
SAMPLES, PROMPT, _CONTINUATION = 3, 32, 48  # texts, and tokens of each
STATE_OFF, WINDOW_OFF = ", state off", ", window off"  # of names
SOURCE_TRAINED, WINDOW_TRAINED = "source, trained", "window, trained"  # the controls

Measure = Callable[[Callable[[float], None]], None]  # takes what is called with the share done


def measurements(
    found: Findings,
    name: str,
    model: PreTrainedModel,
    rows: Sequence[dict[str, Tensor]],
    padding: int,
    *,
    source: PreTrainedModel,
    second: bool,
    last: bool,
) -> Iterator[tuple[str, Measure]]:
    """What is measured of the model of a stage, in order: labels, and what adds to ``found``.

    Args:
        found: what is added to.
        name: of the stage.
        model: of the stage; it is not moved.
        rows: of the test split.
        padding: a token.
        source: the pretrained model.
        second: whether it is the one without training.
        last: whether it is the result.
    """
    ids = [row["input_ids"] for row in rows]
    most = getattr(model.config, "max_position_embeddings", None) or math.inf

    def loss(mode: str, context: Any, progress: Callable[[float], None]) -> None:
        with context:
            found.losses[mode] = _row_losses(model, rows, lambda done: progress(done / len(rows)))

    def heads(progress: Callable[[float], None]) -> None:
        table = converted_heads(model, ids[:_HEAD_ROWS], progress)
        found.heads.append(table.assign(stage=name))

    def decoding(progress: Callable[[float], None]) -> None:
        lengths = [length for length in _LENGTHS if length + 16 <= most] or [1]
        text = torch.cat(ids)
        text = text.repeat(math.ceil(max(_LENGTHS) / len(text)))
        models = {"source": source, name: model}
        found.decoding = decoding_costs(models, text, lengths, progress)

    def continuations(progress: Callable[[float], None]) -> None:
        room = int(min(_CONTINUATION, most - PROMPT))
        found.samples[name] = _continuations(model, padding, ids, room, progress)

    for mode, context in _modes(model, name, second or last):
        yield f"Loss of {mode}", functools.partial(loss, mode, context)
    if model is not source and name not in (SOURCE_TRAINED, WINDOW_TRAINED):
        yield f"Heads of {name}", heads
    if last:
        yield f"Decoding with {name}", decoding
    if last or model is source:
        yield f"Continuations of {name}", continuations


class Findings:
    """What was measured, by the name of a stage or of a mode of its model."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks  # of the test split
        self.losses: dict[str, NDArray[np.float64]] = {}
        self.heads: list[pd.DataFrame] = []
        self.decoding = pd.DataFrame()  # of the first and the last stage
        self.samples: dict[str, Tensor] = {}  # token ids of continuations
        self.runs: dict[str, dict[str, Any]] = {}

    def loss_table(self) -> pd.DataFrame:
        """One row per model: its loss, and the difference from the source.

        With a trained source, also the difference from that. With a gap between the window alone
        and the source, both trained if the controls are, the share of it that is closed.
        """
        names = list(self.losses)
        given = self.losses[names[0]]
        source = self.losses.get(SOURCE_TRAINED, given)
        alone = self.losses.get(WINDOW_TRAINED)
        if alone is None and SOURCE_TRAINED not in self.losses:
            alone = next((self.losses[name] for name in names if name.endswith(STATE_OFF)), None)
        gap = None if alone is None else paired_difference(alone[None], source[None])
        rows = []
        for name, values in self.losses.items():
            row = {"model": name, "loss": values.mean(), **_difference(values, given)}
            if source is not given:
                found = _difference(values, source)
                row |= {f"{key}_trained": x for key, x in found.items()}
            if gap is not None and gap.low > 0 and not name.endswith(WINDOW_OFF):
                assert alone is not None
                row["gap_closed"] = (alone - values).mean() / gap.mean
            rows.append(row)
        return pd.DataFrame(rows)

    def state_brings(self) -> dict[str, float] | None:
        """How much lower the result's loss is than that of the window alone, trained the same way.

        ``None`` without that control, or without a result.
        """
        alone, result = self.losses.get(WINDOW_TRAINED), self.losses.get("finetune")
        return None if alone is None or result is None else _difference(alone, result)


def _difference(values: NDArray[np.float64], others: NDArray[np.float64]) -> dict[str, float]:
    found = paired_difference(values[None], others[None])
    return {"difference": found.mean, "low": found.low, "high": found.high}


def _modes(model: PreTrainedModel, name: str, parts: bool) -> Iterator[tuple[str, Any]]:
    """The names and contexts in which a model's loss is measured."""
    yield name, nullcontext()
    if parts and has_both(model):
        yield name + STATE_OFF, substituted(model, state_off)
        yield name + WINDOW_OFF, substituted(model, window_off)


def _row_losses(
    model: PreTrainedModel, rows: Sequence[dict[str, Tensor]], progress: Callable[[int], None]
) -> NDArray[np.float64]:
    """The mean loss of every row."""
    found = losses(model, rows, progress=progress)
    sums, counts = (x.double().sum(1).numpy() for x in (found.losses, found.predicted))
    return sums / counts


def _continuations(
    model: PreTrainedModel,
    padding: int,
    ids: Sequence[Tensor],
    tokens: int,
    progress: Callable[[float], None],
) -> Tensor:
    """The likeliest continuations of the first tokens of some rows."""
    prompts = torch.stack([x[:PROMPT] for x in ids[:SAMPLES]]).to(model.device)
    if tokens < 1:
        return prompts[:, :0]

    def count(so_far: Tensor, *_: Any, **__: Any) -> Tensor:
        progress((so_far.shape[1] - prompts.shape[1]) / tokens)
        return torch.zeros(len(so_far), dtype=torch.bool, device=so_far.device)

    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=padding,
        stopping_criteria=[count],  # that never stops
    )
    return out[:, prompts.shape[1] :]


@torch.no_grad()
def decoding_costs(
    models: Mapping[str, PreTrainedModel],
    ids: Tensor,
    lengths: Sequence[int],
    progress: Callable[[float], None] = lambda share: None,
) -> pd.DataFrame:
    """The cache and the speed of models after prompts of several lengths.

    The models decode a token each in turn, so that what else the machine does slows all of them.

    Args:
        models: causal language models by their names.
        ids: token ids [T], at least as many as the longest prompt.
        lengths: numbers of tokens of the prompts.
        progress: called with the share of all prompts' tokens that are done.

    Returns:
        One row per model and length: ``stage`` (the name), ``tokens``, ``cache_bytes``,
        ``tokens_per_second`` (the median of 8 single tokens).
    """
    rows: list[dict[str, Any]] = []
    done, every = 0, sum(lengths) * len(models)
    for length in lengths:
        prompt, caches, sizes = ids[None, :length], {}, {}
        for name, model in models.items():
            model.eval()
            new_cache = getattr(model, "new_cache", functools.partial(_usual_cache, model))
            caches[name] = new_cache()
            model.base_model(
                input_ids=prompt.to(model.device), past_key_values=caches[name], use_cache=True
            )
            sizes[name] = cache_bytes(caches[name])
            done += length
            progress(done / every)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(_TOKENS):
            for name, model in models.items():
                token = prompt[:, -1:].to(model.device)
                started = time.perf_counter()
                model(input_ids=token, past_key_values=caches[name], use_cache=True)
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
                seconds[name].append(time.perf_counter() - started)
        for name in models:
            rate = 1 / float(np.median(seconds[name]))
            found = {"tokens": length, "cache_bytes": sizes[name], "tokens_per_second": rate}
            rows.append({"stage": name, **found})
    return pd.DataFrame(rows)


def _usual_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)
