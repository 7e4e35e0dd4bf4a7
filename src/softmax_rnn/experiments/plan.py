"""The runs to make: each one's configuration, folder and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from rich.table import Table

from softmax_rnn.experiments.costs import UTILISATION, bytes_text, cost, count_text, hours_text
from softmax_rnn.report.terminal import terminal_table
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder


@dataclass(frozen=True)
class PlannedRun:
    """A run to make: its configuration and its folder."""

    config: RunConfig
    folder: RunFolder

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name

    def label(self, root: Path) -> str:
        """The folder's path below ``root``, which no other run has."""
        return self.folder.path.relative_to(root).as_posix()

    def config_file(self, root: Path) -> Path:
        """Where the configuration that the run is started with is kept."""
        return root / "configs" / f"{self.label(root)}.yaml"

    def log_file(self, root: Path) -> Path:
        """Where the run's output is kept."""
        return root / "logs" / f"{self.label(root)}.log"


def run_folder(parent: Path, name: str, seed: int) -> RunFolder:
    """The folder of a variant's run: ``taylor-4-seed0`` for ``taylor:4``."""
    return RunFolder(parent / f"{name.replace(':', '-')}-seed{seed}")


def require_different(seeds: Sequence[int]) -> None:
    """Raise ``ValueError`` for a seed that is given twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"A seed is given twice: {', '.join(map(str, seeds))}.")


def plan_table(runs: Sequence[PlannedRun], root: Path, gpu: str) -> pd.DataFrame:
    """Every run with its cost, and whether it is finished; nothing is run."""
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


def rich_plan(plan: pd.DataFrame, gpu: str) -> Table:
    """The plan for the terminal, with the total of the unfinished runs below."""
    rows = [
        [
            row["run"],
            count_text(row["parameters"]),
            f"{row['tokens_per_step'] // row['block_size']} x {row['block_size']}",
            f"{row['steps']:,}",
            count_text(row["tokens"]),
            f"{row['operations']:.2e}",
            hours_text(row["gpu_hours"]),
            bytes_text(row["memory_bytes"]),
            bytes_text(row["disk_bytes"]),
            "finished" if row["finished"] else "",
        ]
        for row in plan.to_dict("records")
    ]
    columns = ("run", "parameters", "tokens/step", "steps", "tokens", "FLOPs", "GPU time")
    table = terminal_table((*columns, "memory", "disk", ""), rows, left=("run", ""))
    table.title = f"{len(plan)} runs; times on one {gpu} at {UTILISATION:.0%} of its peak"
    missing = plan[~plan.finished]
    table.add_section()
    table.add_row(
        f"{len(missing)} to run",
        *[""] * 3,
        count_text(missing.tokens.sum()),
        f"{missing.operations.sum():.2e}",
        hours_text(missing.gpu_hours.sum()),
        "",
        bytes_text(missing.disk_bytes.sum()),
    )
    return table
