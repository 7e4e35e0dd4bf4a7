"""Atomic writes: a file is written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Errors that another folder may avoid. A full disk is not among them.
UNUSABLE = (
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
_TEMPORARY = re.compile(r"\..+\.(\d+|parts)")  # temporary names: of file_aside, and of checkpoints


@contextlib.contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """A temporary file that replaces ``path`` when the block ends, and is removed if it fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    try:
        aside.touch(exist_ok=False)  # others may write in a cache: not through a link of theirs
        yield aside
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees either the old text or the new text."""
    with file_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """As :func:`write_text`, for data of plain types."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def open_regular(path: Path, flags: int = 0) -> Iterator[BinaryIO]:
    """Open a file; ``OSError`` if it is a pipe or a device, which might never end."""
    flags |= getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, usual: os.open(name, usual | flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        yield file


def read_small_json(path: Path) -> Any:
    """Plain data from a file that anyone may have put into a cache.

    Raises:
        OSError: if there is no such file, or nothing that can be read.
        ValueError: for anything but JSON of at most a megabyte.
    """
    with open_regular(path) as file:
        try:
            return json.loads(file.read(1_000_000))
        except RecursionError as error:
            raise ValueError("too many brackets") from error


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise ``ValueError`` if the block cannot write in a folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        raise ValueError(
            f"Nothing can be written in {folder} ({error.strerror}): choose another folder."
        ) from error


def make_writable(folder: Path) -> None:
    """Create a folder if there is none; raise ``ValueError`` if nothing can be written in it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def require_writable(folder: Path) -> None:
    """Raise ``ValueError`` if a folder can be neither written to nor created; create nothing."""
    make_writable(next(path for path in (folder, *folder.absolute().parents) if path.exists()))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of a killed process; no other process may write in ``folder``."""
    for path in folder.iterdir():
        if not _TEMPORARY.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
