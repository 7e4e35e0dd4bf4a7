"""How far a preparation is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


@dataclass(frozen=True)
class Progress:
    """How far a preparation is.

    Attributes:
        share: done, 0 to 1; None where nobody knows how much there is.
        tokens: written, those of earlier sessions included.
        tokens_per_second: of this session.
    """

    share: float | None
    tokens: int
    tokens_per_second: float


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[Progress], None]]:
    """A bar with tokens, speed and time left; what it gives is a ``progress`` of ``prepare``."""
    columns = (
        TextColumn("{task.description}", markup=False),  # a file's name may hold brackets
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, transient=True) as bar:
        task = bar.add_task(label, total=None, speed="")

        def show(progress: Progress) -> None:
            bar.update(
                task,
                total=None if progress.share is None else 1.0,
                completed=progress.share or 0.0,
                speed=f"{progress.tokens:,} tokens, {progress.tokens_per_second:,.0f}/s",
            )

        yield show
