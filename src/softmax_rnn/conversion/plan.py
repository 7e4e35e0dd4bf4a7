"""The stages of a conversion, what they cost, and how long they will take on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn._utils.units import bytes_text, count_text, hours_text
from softmax_rnn.conversion.choice import divergences
from softmax_rnn.conversion.convert import modules_to_save
from softmax_rnn.conversion.initial_values import fit_initial_values
from softmax_rnn.conversion.measures import Findings, measurements
from softmax_rnn.conversion.report import BLOCKS
from softmax_rnn.conversion.stages import ROWS, Conversion, measured_scores
from softmax_rnn.conversion.trainable import (
    check_length,
    conversion_model,
    converted_source,
)
from softmax_rnn.experiments.costs import Cost, gpu_hours, times_on
from softmax_rnn.models.loading import HUB, meta_model
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training.config import STAGES, ConversionConfig
from softmax_rnn.training.losses import autocast, objective, token_losses
from softmax_rnn.training.matmul import widest_float32_products
from softmax_rnn.training.opening import open_model
from softmax_rnn.training.optimizer import adamw
from softmax_rnn.training.run import check_corpora, load_rows

_SECONDS = 3.0  # for each kind of work
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

Work = Callable[[Callable[[float], None]], object]  # takes what is called with the share done


class StageTime(NamedTuple):
    """The time of a stage.

    Attributes:
        seconds: without evaluations.
        per_row: seconds that all evaluations together take for a row of the test split.
    """

    seconds: float
    per_row: float = 0.0


def conversion_table(conversion: Conversion, gpu: str | None) -> Table:
    """The stages of a conversion, their costs and times, for the terminal.

    Args:
        conversion: what is planned.
        gpu: one of ``GPUS``, for the times on one; ``None`` for none.

    Raises:
        ValueError: for a conversion that cannot run.
    """
    check_corpora([conversion.transfer])
    runs = {
        "transfer": [conversion.transfer],
        "finetune": [conversion.finetune],
        "controls": list(conversion.controls.values()),
    }
    costs = {
        name: [conversion_cost(config, gpu) for config in configs] for name, configs in runs.items()
    }
    known = at_hand(conversion.transfer.source)
    times = stage_times(conversion) if known else {}
    try:
        test_rows = len(load_rows(conversion.transfer, create=False)[2])
    except FileNotFoundError:
        test_rows = None
    rows = []
    for name in STAGES:
        if name == "choose" and not conversion.keep:
            continue
        cells = [""] * 8
        if name in runs:
            config, found, count = runs[name][0], costs[name], len(runs[name])
            cells = [
                count_text(found[0].parameters),
                f"{config.batch_size} x {config.block_size}",
                f"{count} x {config.steps:,}" if count > 1 else f"{config.steps:,}",
                count_text(sum(each.tokens for each in found)),
                f"{sum(each.operations for each in found):.2e}",
                bytes_text(max(each.memory_bytes for each in found)),
                bytes_text(sum(each.disk_bytes for each in found)),
                hours_text(sum(each.gpu_hours for each in found)),
            ]
        rows.append([name, *cells, _time_here(times.get(name), known, test_rows)])
    header = ["stage", "parameters", "tokens/step", "steps", "tokens", "FLOPs", "memory", "disk"]
    header += ["GPU time", "time here"]
    if gpu is None:
        header.remove("GPU time")
        rows = [[*row[:-2], row[-1]] for row in rows]
    table = terminal_table(tuple(header), rows, left=("stage",))
    table.title = f"Conversion of {conversion.transfer.source}"
    table.caption = " ".join(_notes(times, test_rows, conversion, gpu))
    return table


def conversion_cost(config: ConversionConfig, gpu: str | None) -> Cost:
    """Estimate the cost of a conversion's run, as :func:`softmax_rnn.experiments.costs.cost`.

    A run that trains the new attention alone passes each token once through the source (2
    operations per parameter), and forward and backward through the new attention. Training LoRA's
    additions takes 4 operations per parameter, training all weights 6, and distillation 2 more.
    """
    model = meta_model(config.source)
    sizes = model.config
    count = sizes.num_hidden_layers
    if config.layers is not None and max(config.layers) >= count:
        raise ValueError(f"{config.source} has the layers 0 to {count - 1}, not {config.layers}.")
    check_length(model, config)
    parameters = int(model.num_parameters())
    rows, width = model.get_input_embeddings().weight.shape
    matrices = parameters - (0 if sizes.tie_word_embeddings else rows * width)
    attention = sizes.num_hidden_layers * sizes.hidden_size * config.block_size
    tokens = config.steps * config.tokens_per_step
    distilled = config.objective == "language" and config.distillation > 0
    if config.objective == "transfer":
        per_token = 2 * matrices + (2 + 6) * attention
    else:
        per_token = (4 if config.adapted else 6) * (matrices + attention)
        per_token += (2 if distilled else 0) * (matrices + attention)
    copies = 2 if distilled and not config.adapted else 1
    states = 0 if config.objective == "transfer" or config.adapted else 12 * parameters
    layers = 1 if config.gradient_checkpointing else sizes.num_hidden_layers
    logits = 0 if config.objective == "transfer" else 4 * rows
    micro = config.tokens_per_step // config.accumulation
    return Cost(
        parameters=parameters,
        tokens=tokens,
        operations=float(tokens * per_token),
        gpu_hours=gpu_hours(tokens * per_token, gpu),
        memory_bytes=4.0 * parameters * copies
        + states
        + 4.0 * micro * (layers * 14 * sizes.hidden_size + 2 * logits),
        disk_bytes=4.0 * parameters * 2,
    )


def _time_here(found: StageTime | None, known: bool, test_rows: int | None) -> str:
    if found is None:
        return "nothing to train" if known else "not known"
    if found.per_row and test_rows is None:
        return f"{hours_text(found.seconds / 3600)} + evaluations"
    return hours_text((found.seconds + found.per_row * (test_rows or 0)) / 3600)


def _notes(
    times: dict[str, StageTime], test_rows: int | None, conversion: Conversion, gpu: str | None
) -> list[str]:
    """What the times are, and which are not known."""
    where = "a GPU of this machine" if torch.cuda.is_available() else "this machine"
    notes = [f"Time here: estimated from the first batches on {where}."]
    if not times:
        notes = ["The times here are not known: the model is not on this machine."]
    elif test_rows is None:
        per_row = sum(found.per_row for found in times.values())
        notes.append(
            f"The corpus {conversion.transfer.corpus} is not prepared, so the size of its test "
            f"split is not known: all evaluations take {per_row * 1000 / 60:.1f} min per 1,000 "
            f"blocks of it."
        )
    if gpu is not None:
        notes.append(f"GPU time: {times_on(gpu)}.")
    return notes


class _EnoughError(Exception):
    """Ends work whose time is known."""


def expected_seconds(work: Work, seconds: float | None = None) -> float:
    """The seconds that ``work`` would take: it is stopped soon, and its share of all is known.

    The first batch may be slow, so it counts once, and the others by the share that they are.
    """
    enough = _SECONDS if seconds is None else seconds
    started = time.perf_counter()
    first: tuple[float, float] | None = None
    expected = 0.0

    def progress(share: float) -> None:
        nonlocal first, expected
        now = time.perf_counter() - started
        if first is None:
            first = now, share
            return
        if share > first[1] and now > enough:
            expected = first[0] + (now - first[0]) * (1 - first[1]) / (share - first[1])
            raise _EnoughError

    try:
        work(progress)
    except _EnoughError:
        return expected
    return time.perf_counter() - started


def at_hand(source: str) -> bool:
    """Whether the weights of a model are on this machine."""
    if not source.startswith(HUB):
        return True  # else it could not be opened at all
    name = source.removeprefix(HUB)
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _WEIGHTS)


@widest_float32_products()
def stage_times(conversion: Conversion) -> dict[str, StageTime]:
    """The time of every stage of a conversion on this machine, from its first batches.

    The text is random tokens: the time does not depend on it.
    """
    with ProgressBar("Timing the first batches", 4, transient=True) as bar:
        controls = conversion.controls
        fit, choose, report, transferable = _fit_and_report(conversion.transfer, list(controls))
        bar.update(2)
        found = {"fit": StageTime(fit), "choose": StageTime(choose)}
        if transferable:
            found["transfer"] = _training(conversion.transfer)
        bar.update(3)
        start = dataclasses.replace(conversion.finetune, source=conversion.transfer.source)
        found["finetune"] = _training(start)
        each = [_training(config) for config in controls.values()]
        found["controls"] = StageTime(*(sum(x) for x in zip(*each, strict=True)))
    return {**found, "report": StageTime(report)}


def _fit_and_report(
    config: ConversionConfig, controls: Sequence[str]
) -> tuple[float, float, float, bool]:
    """The seconds of fit, choose and report; whether the new attention has parameters."""
    started = time.perf_counter()
    source = open_model(config.source).model
    model, _ = converted_source(open_model(config.source).model, config)
    loading = time.perf_counter() - started
    rows = _rows(model, max(ROWS, BLOCKS), config.block_size)
    fit = loading + expected_seconds(lambda done: measured_scores(source, list(rows), done))
    fit += expected_seconds(lambda done: fit_initial_values(model, list(rows[:ROWS]), done))
    report = 2 * loading + _report_seconds(source, model, rows[:BLOCKS], controls)
    choose = loading + expected_seconds(lambda done: divergences(model, list(rows[:ROWS]), done))
    return fit, choose, report, bool(modules_to_save(model))


def _rows(model: PreTrainedModel, count: int, length: int) -> Tensor:
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (count, length), generator=numbers)


def _report_seconds(
    source: PreTrainedModel, converted: PreTrainedModel, rows: Tensor, controls: Sequence[str]
) -> float:
    """The time of all measurements; those of equal models are timed once."""
    batch = [{"input_ids": ids, "labels": ids} for ids in rows]
    known: dict[tuple[bool, str], float] = {}
    total = 0.0
    for name in ("source", *controls, "fitted", "transfer", "finetune"):
        place = {"second": name == "fitted", "last": name == "finetune"}
        own = name not in ("source", *controls)
        model = converted if own else source
        for label, measure in measurements(
            Findings(0), name, model, batch, 0, source=source, **place
        ):
            kind = own, label.replace(name, "")
            if kind not in known:
                known[kind] = expected_seconds(measure)
            total += known[kind]
    return total


def _training(config: ConversionConfig) -> StageTime:
    """The time of a run, without checkpoints."""
    model, _ = conversion_model(open_model(config.source).model, config)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    forward, optimizer = objective(model, config), adamw(model, config)
    micro = config.batch_size // config.accumulation

    def batch(count: int) -> dict[str, Tensor]:
        ids = _rows(model, count, config.block_size).to(model.device)
        return {"input_ids": ids, "labels": ids}

    def steps(done: Callable[[float], None]) -> None:
        model.train()
        passes = config.steps * config.accumulation
        for number in range(1, passes + 1):
            with autocast(model.device, config.precision):
                loss = forward(config.tokens_per_step, **batch(micro))
            float(loss.detach())  # waits for a GPU
            loss.backward()
            if number % config.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            done(number / passes)

    def test(done: Callable[[float], None]) -> None:
        model.eval()
        for number in range(1, 101):
            with autocast(model.device, config.precision):
                float(token_losses(model, batch(2 * micro)).losses.sum())
            done(number / 100)

    seconds = expected_seconds(steps)
    evaluations = -(-config.steps // config.evaluate_every)
    return StageTime(seconds, evaluations * expected_seconds(test) / (100 * 2 * micro))
