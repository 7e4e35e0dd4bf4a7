"""Start functions in processes that have imported everything: imports take longer than a small run.

On Linux the processes are forks of a server, which has imported modules and done nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Signals for a whole group of processes. The server must outlive them: it reports exit codes.
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def start(
    target: Callable[..., Any],
    *args: Any,
    log: Path,
    environment: Mapping[str, str],
    preload: Sequence[str],
    fork: bool = True,
) -> BaseProcess:
    """Call ``target(*args)`` in a new process, which leads a session of its own.

    Args:
        target: a function at the top of a module; its exit code is that of ``sys.exit``.
        args: its arguments, which must be picklable.
        log: file to which the output is appended.
        environment: all variables of the process. Those that libraries read when they are loaded
            are the ones of the first call.
        preload: modules that the server imports, at the first call.
        fork: whether the process may be a fork; else it imports everything itself.
    """
    fork = fork and sys.platform == "linux"  # elsewhere, system libraries do not survive a fork
    context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
    given = target, args, log, dict(environment)
    process: BaseProcess = context.Process(target=_work, args=given)
    with _environ(environment):
        if fork:
            context.set_forkserver_preload([*preload])
            resource_tracker.ensure_running()  # unblocks signals, so it comes first
            with _blocked(_SIGNALS):
                forkserver.ensure_running()
        process.start()
    return process


def _work(
    target: Callable[..., Any], args: tuple[Any, ...], log: Path, environment: Mapping[str, str]
) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    gc.freeze()  # imported objects are no garbage; looking at them would copy their memory
    target(*args)


@contextlib.contextmanager
def _blocked(signals: set[signal.Signals]) -> Iterator[None]:
    """Processes started here never get these signals, unless they ask for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
