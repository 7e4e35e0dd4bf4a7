"""Detection of damaged files, by SHA-256 hashes that are stored with the data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from softmax_rnn._utils.files import sync, write_json

MANIFEST = "manifest.json"


def sha256(data: str | bytes) -> str:
    """The hash of a text in UTF-8, or of bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_damage(path: Path, size: int, digest: str | None = None) -> str | None:
    """How a file differs from ``size`` bytes with the hash ``digest`` (if given), or None."""
    if not path.is_file():
        return f"{path.name} is missing"
    if (found := path.stat().st_size) != size:
        return f"{path.name} has {found} bytes, not {size}"
    if digest is not None and (found_digest := sha256_of_file(path)) != digest:
        return (
            f"{path.name} is not what was written (SHA-256 {found_digest[:16]}, not {digest[:16]})"
        )
    return None


def write_sealed(path: Path, data: dict[str, Any]) -> None:
    """Write plain data with its hash."""
    write_json(path, {**data, "seal": sha256(json.dumps(data))})


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What :func:`write_sealed` has written; None if the file holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        seal = data.pop("seal")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return data if seal == sha256(json.dumps(data)) else None


def seal(folder: Path) -> None:
    """Write a folder's manifest (size and hash of every file) after all data is on the disk."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_of_file(path),
        }
        for path in paths
    }
    for path in paths:
        sync(path)
    write_json(folder / MANIFEST, {"files": files})
    for parent in {folder, *(path.parent for path in paths)}:
        sync(parent)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, or None; every file is read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, about in manifest["files"].items():
            if found := file_damage(folder / name, about["bytes"], about["sha256"]):
                return found
        for path in folder.rglob("*.safetensors"):  # which a reader of all would take in
            if path.relative_to(folder).as_posix() not in manifest["files"]:
                return f"{path.name} is not listed in {MANIFEST}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None
