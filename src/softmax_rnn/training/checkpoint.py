"""Checkpoints that can be trusted: a manifest with the hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from softmax_rnn._utils.files import sync, write_json
from softmax_rnn.training.callbacks import notice
from softmax_rnn.training.folder import RunFolder

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


def model_folder(path: Path) -> Path:
    """The folder of a saved model: ``path`` itself, or a run's newest whole checkpoint.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: if ``path`` is a damaged checkpoint.
        CheckpointError: if all checkpoints of a run are damaged.
    """
    if (path / "config.json").exists():
        run = RunFolder(path.parent)
        sealed = path in run.checkpoints or (path / MANIFEST).exists()
        if run.exists and sealed and (wrong := damage(path)):
            raise ValueError(f"{path} is damaged: {wrong}.")
        return path
    run = RunFolder(path)
    while checkpoints := run.checkpoints:
        if not run.exists:  # another trainer's: nothing says what was written
            return checkpoints[-1]
        try:
            found, left_out = newest_whole(checkpoints)
        except CheckpointError:
            if any(checkpoint.exists() for checkpoint in checkpoints):
                raise
            continue  # the run has replaced them meanwhile
        for name, wrong in left_out.items():
            notice(f"{name} is left out: {wrong}.")
        assert found is not None
        return found
    raise FileNotFoundError(
        f"{path} holds no model: neither config.json nor a checkpoint-N folder."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
