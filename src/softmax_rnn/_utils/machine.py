"""This machine: its processor, and the user's cache folder."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """The name of the CPU."""
    return in_proc("cpuinfo", r"model name\s*: (.*)") or platform.processor() or platform.machine()


def in_proc(name: str, pattern: str) -> str | None:
    """The first match in a file of Linux's /proc; None on other systems."""
    path = Path("/proc") / name
    found = re.search(pattern, path.read_text()) if path.exists() else None
    return found[1] if found else None


def cache_folder() -> Path:
    """``$SOFTMAX_RNN_CACHE``, or a folder in the user's cache folder.

    Raises:
        OSError: if the user has no home folder, as in some containers.
    """
    if named := os.environ.get("SOFTMAX_RNN_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softmax-rnn"
    except RuntimeError as error:
        raise OSError(f"{error} SOFTMAX_RNN_CACHE can name a folder for caches.") from error
