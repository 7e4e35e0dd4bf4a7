"""Progress bars, and messages above them. Both are written to standard error."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True)
_SECONDS_BETWEEN_LINES = 60.0  # without a terminal; keeps the log of a long run short


def notice(message: str) -> None:
    """Print a message on its own lines, above the progress bar."""
    console.print(message, soft_wrap=True, markup=False, highlight=False)


class ProgressBar:
    """A bar with the time left; without a terminal, one line per minute.

    Args:
        label: what is being done.
        total: the number of things to do; None while it is not known.
        completed: how many of them were done before.
        visible: whether to show anything.
        transient: whether the bar disappears at the end.
    """

    def __init__(
        self,
        label: str,
        total: float | None = None,
        completed: float = 0,
        *,
        visible: bool = True,
        transient: bool = False,
    ) -> None:
        self._label = label
        self._printed = time.monotonic()
        self._live, self._visible = visible and console.is_terminal, visible
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),  # a file's name may hold brackets
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,  # so that batches of minutes have a speed, too
            transient=transient,
            disable=not self._live,
        )
        self._task = self._progress.add_task(label, total=total, completed=int(completed), text="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(
        self,
        completed: float,
        text: str = "",
        total: float | None = None,
        label: str | None = None,
    ) -> None:
        """Move the bar to ``completed``, with ``text`` next to it; another label starts it anew."""
        fields: dict[str, Any] = {} if total is None else {"total": total}
        if label is not None and label != self._label:
            self._label = label
            self._progress.reset(self._task, description=label)
        self._progress.update(self._task, completed=completed, text=text, **fields)
        now = time.monotonic()
        if self._live or not self._visible or now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        task = self._progress.tasks[0]
        seconds = task.time_remaining
        left = "" if seconds is None else f"{int(seconds) // 60} min {int(seconds) % 60} s left"
        share = "" if task.total is None else f"{task.percentage:.0f}%"
        notice(f"{self._label}: {', '.join(filter(None, (share, text, left)))}")
