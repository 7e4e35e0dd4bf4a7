"""Stop requests: by a signal, or after a time limit."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar, Self

_URGENT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ANNOUNCING = (signal.SIGUSR1, signal.SIGUSR2)  # sent by Slurm and submitit before the time limit
# In order of increasing priority: after an announcement, the job should be requeued.
_ORDER = (0, *_URGENT, signal.SIGALRM, *_ANNOUNCING)
# Seconds. Within this time, a second signal is the same request: a scheduler sends a signal to the
# process, and a parent process forwards its own.
_AGAIN = 2.0
_LONGEST = 10_000 * 86400  # seconds
_UNITS = (86400, 3600, 60, 1)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


class RunStopped(BaseException):
    """A run was stopped and can be resumed. Not an ``Exception``: readers catch those.

    Args:
        code: the signal's number; 0 if only other processes received it.
        where: the step at which it stopped; empty if training had not started.
    """

    def __init__(self, code: int, where: str = "") -> None:
        names = {0: "", signal.SIGALRM: " by its time limit"}
        name = names[code] if code in names else f" by {signal.Signals(code).name}"
        super().__init__(f"Stopped{name} {where}".rstrip())
        self.code = code


class StopRequest:
    """Handles signals within a block: the first one is a request to stop.

    Before :meth:`defer`, it raises :class:`RunStopped` at once; afterwards, it only sets
    :attr:`code`. The second SIGTERM, SIGINT or SIGHUP ends the process. Signals that were ignored
    stay ignored (``nohup``).

    Args:
        after: seconds after which to stop as by a signal; None for no limit.

    Attributes:
        ends_process: whether a stop ends the process. Then signals are handled until the process
            exits, since the same request may be sent twice.
        code: the number of the received signal, the :func:`foremost` of several; SIGALRM's after
            the time limit; 0 before.
        at_once: called when the second signal ends the process.

    Raises:
        ValueError: for a time limit outside the main thread, which receives no signals.
    """

    ends_process: ClassVar[bool] = False

    def __init__(self, after: float | None = None) -> None:
        self.code = 0
        self.at_once: Callable[[], object] = lambda: None
        self._after = after
        self._since: float | None = None
        self._deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            if self._after is not None:
                raise ValueError("A time limit needs the main thread.")
            return self
        timer = () if self._after is None else (signal.SIGALRM,)
        for number in (*_URGENT, *_ANNOUNCING, *timer):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        if self._after is not None:
            signal.setitimer(signal.ITIMER_REAL, self._after)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._after is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if not (self.ends_process and isinstance(error, RunStopped)):
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if isinstance(error, RunStopped):  # another signal may have arrived since
            error.code = foremost((error.code, self.code))

    def defer(self) -> None:
        """From now on, only record stop requests in :attr:`code`."""
        self._deferred = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in _URGENT:
            if self._since is not None and now - self._since >= _AGAIN:
                self.at_once()
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._since = self._since or now
        before, self.code = self.code, foremost((self.code, number))
        if not before and not self._deferred:
            raise RunStopped(number)


def time_left(limit: float | None) -> Callable[[], float | None]:
    """The seconds that are left of a limit that starts now, more than 0; ``None`` for no limit."""
    started = time.monotonic()
    # A timer of 0 would never end.
    return lambda: None if limit is None else max(limit - (time.monotonic() - started), 1e-3)


def foremost(codes: Iterable[int]) -> int:
    """The signal with the highest priority; 0 is none.

    A scheduler that ends a job early may send SIGTERM first; its own signal then has priority.
    """
    return max(codes, key=_ORDER.index)


def seconds(duration: str) -> float:
    """The seconds of a duration such as ``1h50m``, ``2d`` or ``90s``.

    Raises:
        ValueError: for anything else, for zero, and for more than a timer accepts.
    """
    match = _DURATION.fullmatch(duration)
    numbers = match.groups("0") if match else ()
    total = sum(float(number) * unit for number, unit in zip(numbers, _UNITS, strict=False))
    if total <= 0:
        raise ValueError(f"A duration is written as in 2d, 1h50m or 90s, not {duration!r}.")
    if total > _LONGEST:
        raise ValueError(f"A duration has at most {_LONGEST // 86400} days, not {duration!r}.")
    return total
