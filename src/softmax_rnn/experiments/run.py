"""A run of a set: its configuration, its folder, and what is kept beside the folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        """What tells the run from all others below ``root``."""
        return self.folder.path.relative_to(root).as_posix()


def require_different(seeds: Sequence[int]) -> None:
    """Raise ``ValueError`` for a seed that is given twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"A seed is given twice: {', '.join(map(str, seeds))}.")


def config_file(run: PlannedRun, root: Path) -> Path:
    """Where the configuration that a run is started with is kept."""
    return root / "configs" / f"{run.label(root)}.yaml"


def log_file(run: PlannedRun, root: Path) -> Path:
    """Where what a run prints is kept."""
    return root / "logs" / f"{run.label(root)}.log"
