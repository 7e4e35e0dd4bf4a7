"""Files that no other user can have written: what is executed may come from a shared cache.

A hash shows damage. Against another user only the owner and the permissions help, and they must be
those of what is read: a name may lead elsewhere a moment later. So everything is asked of an open
descriptor, and a folder is used by its descriptor. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from softmax_rnn._utils.files import open_regular

_PAUSE = 0.05  # seconds between two tries to lock


def objection(found: os.stat_result) -> str | None:
    """Why another user may have written a file or folder; None if only root or this user may.

    The group's permission includes those of access control lists.
    """
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return None


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """A folder that no other user can change, created if need be.

    Yields:
        Another path to it, valid inside the block: the same folder even if ``path`` is given to
        another one meanwhile.

    Raises:
        OSError: if another user may write to it, or it is a link or no folder.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        raise OSError("it is a link") from error
    try:
        if reason := objection(os.fstat(descriptor)):
            raise OSError(reason)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_own(path: Path) -> Iterator[BinaryIO]:
    """Open a file that no other user can have written.

    Raises:
        OSError: if another user may write to it, or it is a link or has another name as well.
    """
    with open_regular(path, os.O_NOFOLLOW) as file:
        found = os.fstat(file.fileno())
        if reason := "it has several names" if found.st_nlink > 1 else objection(found):
            raise OSError(reason)
        yield file


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Let one process or thread at a time into the block; ``path`` is a file for the lock.

    Raises:
        OSError: if others keep the lock for ``seconds``, or the file system has no locks.
    """
    import fcntl  # other systems have none

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise OSError(f"another process has locked it for {seconds:.0f} s") from None
                time.sleep(_PAUSE)
        try:
            yield
        finally:  # closing is not enough: a process that was forked meanwhile has it open, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
