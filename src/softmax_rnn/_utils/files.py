"""Writing that is never half done: aside, then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What is the user's to change; a full disk, say, is the machine's.
UNUSABLE = (
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
_ASIDE = re.compile(r"\..+\.(\d+|parts)")  # the names given below, and a checkpoint's parts


@contextlib.contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """A file to write that becomes ``path`` when the block ends well, and is removed if not."""
    aside = _aside(path)
    try:
        yield aside
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file, so that a reader sees the old text or the new one."""
    with file_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """As :func:`write_text`, for data of plain types."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``path`` when the block ends well, and is removed if not."""
    aside = _aside(path)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if not path.exists():  # else another process was faster, and its folder is as whole
            aside.replace(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Tell that a folder, or its place, is not one to write to, as a ``ValueError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        raise ValueError(
            f"Nothing can be written in {folder} ({error.strerror}): choose another folder."
        ) from error


def make_writable(folder: Path) -> None:
    """Make a folder, unless it is there, and try whether it can be written to.

    Raises:
        ValueError: if not.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def require_writable(folder: Path) -> None:
    """Try whether a folder can be written to, or made; nothing is made.

    Raises:
        ValueError: if not, naming the nearest folder that is there.
    """
    make_writable(next(path for path in (folder, *folder.absolute().parents) if path.exists()))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left aside in ``folder``; nobody else may be writing there."""
    for path in folder.iterdir():
        if not _ASIDE.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
