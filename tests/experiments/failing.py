"""A job that does not import the package, which would take most of its time."""

from __future__ import annotations

import submitit


def fail_in_one(blame: str) -> None:
    """The second of two processes fails; the first blames it."""
    rank = submitit.JobEnvironment().global_rank
    raise ChildProcessError("the second one's own" if rank else blame)
