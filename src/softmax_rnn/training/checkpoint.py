"""Checkpoints that can be trusted: a manifest with the hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from softmax_rnn.files import sync, write_json

MANIFEST = "manifest.json"


class CheckpointError(OSError):
    """A checkpoint that cannot be written, or none that can be read."""


def seal(checkpoint: Path) -> None:
    """List every file with its size and hash, and wait until all of it is on the disk."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    files = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
        for path in paths
    }
    for path in paths:
        sync(path)
    write_json(checkpoint / MANIFEST, {"files": files})
    for folder in {checkpoint, *(path.parent for path in paths)}:
        sync(folder)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None; every file is read."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = {checkpoint / name: about for name, about in manifest["files"].items()}
        for path, about in files.items():
            size = path.stat().st_size
            if size != about["bytes"]:
                return f"{path.name} has {size} bytes, not {about['bytes']}"
            if _sha256(path) != about["sha256"]:
                return f"{path.name} is not what was written (another SHA-256)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def newest_whole(checkpoints: Sequence[Path]) -> tuple[Path | None, dict[str, str]]:
    """The newest checkpoint without damage, and what is wrong with those after it.

    Args:
        checkpoints: oldest first.

    Raises:
        CheckpointError: if there are checkpoints, and all are damaged.
    """
    skipped: dict[str, str] = {}
    for checkpoint in reversed(checkpoints):
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint, skipped
        skipped[checkpoint.name] = wrong
    if skipped:
        told = "; ".join(f"{name}: {wrong}" for name, wrong in skipped.items())
        raise CheckpointError(
            f"No checkpoint in {checkpoints[0].parent} is whole ({told}). Bring a whole one back, "
            "or remove them all to start from the first step."
        )
    return None, skipped


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
