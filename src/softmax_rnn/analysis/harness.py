"""EleutherAI's Language Model Evaluation Harness (``lm_eval``) for any model of this library."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softmax_rnn._utils.errors import nearest
from softmax_rnn.report.terminal import terminal_table

_RESAMPLES = 1000  # of bootstrapped standard errors; those of means need none
_NUMBERS = ("value", "standard_error")

# Loggers that report the defaults of a task, and that a model was passed as an object. The latter
# also says when a context is too long for the model.
_OF_TASKS = ("lm_eval.config.task", "lm_eval.api.task", "lm_eval.evaluator")
_OF_MODELS = ("lm_eval.models.huggingface",)


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
) -> list[dict[str, Any]]:
    """Run tasks of lm_eval.

    A task is a YAML file, which may name Python functions. They are executed, so ``include_path``
    must be a folder that you trust.

    Args:
        model: a causal language model in evaluation mode, on its device.
        tokenizer: its tokenizer, with an end-of-text token.
        tasks: names of tasks or groups.
        include_path: a folder of further tasks.
        num_fewshot: examples before each question; by default the task's own number.
        limit: the first so many questions of each task, or below 1 this share of them.
        batch_size: requests per forward pass.
        max_length: the longest context, in tokens; by default the model's number of positions.

    Returns:
        A row per task and metric: ``task``, ``metric``, ``filter``, ``value``, ``standard_error``,
        ``higher_is_better``, ``shots``, ``questions`` and ``version``. What lm_eval does not report
        is ``None``.

    Raises:
        ValueError: for an unknown task, with the nearest one; for a tokenizer without end-of-text
            token; or if a task does not fit the model.
        FileNotFoundError: if ``include_path`` is not a folder.
    """
    if include_path is not None and not include_path.is_dir():
        raise FileNotFoundError(f"{include_path} is not a folder with tasks.")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no end-of-text token, which tasks need: name one of its tokens with "
            "end_of_text."
        )
    with _without_notes(*_OF_TASKS, *_OF_MODELS):
        manager = _manager(tasks, include_path)
        wrapped = HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=max_length,
        )
    try:
        with _without_notes(*_OF_TASKS):
            found = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=False,
                bootstrap_iters=_RESAMPLES,
            )
    except AssertionError as error:  # of lm_eval, for settings that exclude each other
        raise ValueError(f"lm_eval cannot run {', '.join(tasks)}: {error}") from error
    return [row for name in found["results"] for row in _rows(name, found)]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table of :func:`run_tasks`'s rows for the terminal."""
    left = ("task", "metric", "filter")
    header = (*left, "value", "standard error", "shots", "questions")
    return terminal_table(
        header,
        (
            [
                *(row[name] for name in left),
                *("-" if row[key] is None else f"{row[key]:.4f}" for key in _NUMBERS),
                *("-" if row[key] is None else f"{row[key]}" for key in ("shots", "questions")),
            ]
            for row in rows
        ),
        left=left,
    )


def _manager(tasks: Sequence[str], include_path: Path | None) -> TaskManager:
    """The index of tasks: the folder's own if it has them all, since that of lm_eval is slow."""
    path = None if include_path is None else str(include_path)
    if path is not None:
        manager = TaskManager(include_path=path, include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=path)
    for task in tasks:
        if task not in manager.task_index:
            raise ValueError(
                f"Unknown task {task!r}.{nearest(task, manager.all_tasks)} `lm_eval ls tasks` "
                "lists those of lm_eval; include_path adds a folder of your own."
            )
    return manager


def _rows(task: str, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    measured = found["results"][task]
    better = found.get("higher_is_better", {}).get(task) or {}
    for key, value in measured.items():
        metric, comma, name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        yield {
            "task": task,
            "metric": metric,
            "filter": name,
            "value": _number(value),
            "standard_error": _number(measured.get(f"{metric}_stderr,{name}")),
            "higher_is_better": better.get(metric),
            "shots": found["n-shot"].get(task),
            "questions": found["n-samples"].get(task, {}).get("effective"),
            "version": found["versions"].get(task),
        }


def _number(value: Any) -> float | None:
    """A finite number; lm_eval writes 'N/A' for others."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else None


@contextlib.contextmanager
def _without_notes(*names: str) -> Iterator[None]:
    """Show only the errors of these loggers."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
