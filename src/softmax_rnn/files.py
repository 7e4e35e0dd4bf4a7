"""Writing that is never half done: aside, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a whole file, so that a reader sees the old text or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def write_json(path: Path, data: Any) -> None:
    """As :func:`write_text`, for data of plain types."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``path`` when the block ends well, and is removed if not."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if not path.exists():  # else another process was faster, and its folder is as whole
            aside.replace(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
