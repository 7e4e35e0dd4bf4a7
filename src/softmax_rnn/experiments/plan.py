"""Planned runs: each one's configuration, folder and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from rich.table import Table

from softmax_rnn._utils.units import bytes_text, count_text, hours_text
from softmax_rnn.experiments.costs import cost, times_on
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder


@dataclass(frozen=True)
class PlannedRun:
    """A run to execute: its configuration and its folder."""

    config: RunConfig
    folder: RunFolder

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name

    def label(self, root: Path) -> str:
        """The folder's path relative to ``root``; unique among the runs of a set."""
        return self.folder.path.relative_to(root).as_posix()

    def config_file(self, root: Path) -> Path:
        """The file with the configuration that the run is started with."""
        return root / "configs" / f"{self.label(root)}.yaml"

    def log_file(self, root: Path) -> Path:
        """The file with the run's output."""
        return root / "logs" / f"{self.label(root)}.log"


def run_folder(parent: Path, name: str, seed: int) -> RunFolder:
    """The folder of a variant's run: ``taylor-4-seed0`` for ``taylor:4`` with seed 0."""
    return RunFolder(parent / f"{name.replace(':', '-')}-seed{seed}")


def require_different(seeds: Sequence[int]) -> None:
    """Raise ``ValueError`` if a seed is given twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"A seed is given twice: {', '.join(map(str, seeds))}.")


def require_trainable(config: RunConfig, name: str) -> None:
    """Raise ``ValueError``, with the run's name, unless a small step of its model succeeds.

    The model has one layer and few tokens; seed and random state are not changed.
    """
    from softmax_rnn.training.run import new_model  # slow to import

    tokens = torch.zeros(1, min(config.block_size, 4), dtype=torch.int64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # the same answer each time
            small = new_model(replace(config, num_layers=1, vocab_size=2), 2, 0)
            small(input_ids=tokens, labels=tokens).loss.backward()
    except Exception as error:  # an attention may raise anything
        raise ValueError(f"{name} cannot be trained: {type(error).__name__}: {error}") from error


def plan_table(runs: Sequence[PlannedRun], root: Path, gpu: str | None) -> pd.DataFrame:
    """Every run with its cost and whether it is finished; nothing is executed."""
    return pd.DataFrame(
        {
            "run": run.label(root),
            "finished": run.folder.finished,
            "tokens_per_step": run.config.tokens_per_step,
            "block_size": run.config.block_size,
            "steps": run.config.steps,
            **asdict(cost(run.config, gpu)),
        }
        for run in runs
    )


def rich_plan(plan: pd.DataFrame, gpu: str | None) -> Table:
    """The plan for the terminal, with the total of the unfinished runs in the last row."""
    shown = {
        "run": plan.run,
        "parameters": plan.parameters.map(count_text),
        "tokens/step": [
            f"{tokens // size} x {size}"
            for tokens, size in zip(plan.tokens_per_step, plan.block_size, strict=True)
        ],
        "steps": plan.steps.map("{:,}".format),
        "tokens": plan.tokens.map(count_text),
        "FLOPs": plan.operations.map("{:.2e}".format),
        "GPU time": plan.gpu_hours.map(hours_text),
        "memory": plan.memory_bytes.map(bytes_text),
        "disk": plan.disk_bytes.map(bytes_text),
        "": plan.finished.map({True: "finished", False: ""}),
    }
    missing = plan[~plan.finished]
    sums = {
        "run": f"{len(missing)} to run",
        "tokens": count_text(missing.tokens.sum()),
        "FLOPs": f"{missing.operations.sum():.2e}",
        "GPU time": hours_text(missing.gpu_hours.sum()),
        "disk": bytes_text(missing.disk_bytes.sum()),
    }
    if gpu is None:
        del shown["GPU time"]
    table = terminal_table(tuple(shown), zip(*shown.values(), strict=True), left=("run", ""))
    table.title = f"{len(plan)} runs; {times_on(gpu)}"
    table.add_section()
    table.add_row(*(sums.get(name, "") for name in shown))
    return table
