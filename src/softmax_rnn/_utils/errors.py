"""Exit codes, and error messages that suggest the nearest match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """The exit status of a command."""

    FINISHED = 0
    FAILED = 1
    WRONG_INPUT = 2
    STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
    INTERRUPTED = 130  # 128 + SIGINT, as shells count


EXIT_CODES = {
    ExitCode.FINISHED: "finished",
    ExitCode.FAILED: "the run failed",
    ExitCode.WRONG_INPUT: "invalid arguments, corpus or run folder",
    ExitCode.STOPPED: "stopped by a signal or --stop-after; to resume rerun it (train: --resume)",
    ExitCode.INTERRUPTED: "interrupted where there is nothing to save",
}


_CLOSE = 0.75  # of 1, from which on a match is clear
_SHORT = 8  # names that are always listed


def nearest(value: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """`` Did you mean ...?``, or nothing if no name resembles ``value``.

    In names with a number, such as ``taylor:2``, any number may stand: that of ``value`` is kept.
    """
    number = re.search(r":\d+", value)
    if number:
        names = [re.sub(r":\d+", number[0], name) for name in names]
    near = difflib.get_close_matches(value, names, n=2, cutoff=cutoff)
    near.sort(key=lambda name: not name.startswith(value))
    return f" Did you mean {near[0]!r}?" if near else ""


def unknown(what: str, value: object, allowed: Iterable[str]) -> ValueError:
    """The error for a ``value`` outside the closed set ``allowed``.

    It lists what is allowed, unless there are many names and one of them is clearly meant.
    """
    names = list(allowed)
    clear = nearest(str(value), names, _CLOSE) if len(names) > _SHORT else ""
    hint = clear or f"{nearest(str(value), names)} Allowed: {', '.join(names)}."
    return ValueError(f"Unknown {what} {value!r}.{hint}")


def require_choice(what: str, value: object, allowed: Iterable[str]) -> None:
    """Raise :func:`unknown` unless ``value`` is one of ``allowed``."""
    names = list(allowed)
    if value not in names:
        raise unknown(what, value, names)


def shown(value: Any) -> str:
    """A value in an error message: its repr, truncated."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def differences(there: Mapping[str, Any], here: Mapping[str, Any], now: str = "now") -> str:
    """The differing values of two mappings with the same keys, as text; empty if there are none."""
    return "; ".join(
        f"{key}: {there[key]!r} there, {here[key]!r} {now}"
        for key in there
        if there[key] != here[key]
    )


def missing_extra(extra: str, needed_for: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a package that only an optional dependency group (an extra) installs."""
    return ModuleNotFoundError(
        f"{needed_for} needs the package {error.name!r}: pip install 'softmax-rnn[{extra}]'.",
        name=error.name,
    )
