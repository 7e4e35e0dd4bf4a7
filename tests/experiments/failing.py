"""Jobs that do not import the package, which would take most of their time."""

from __future__ import annotations

import submitit


def fail_in_one(blame: str) -> None:
    """The second of two processes fails; the first blames it."""
    rank = submitit.JobEnvironment().global_rank
    raise ChildProcessError("the second one's own" if rank else blame)


class Fails:
    """In place of a training, whose configuration it leaves alone."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self) -> int:
        raise ValueError("the job's own reason")
