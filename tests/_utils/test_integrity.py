"""Hashes of files, sealed data and sealed folders: whatever changed is found and named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from softmax_rnn._utils.integrity import (
    MANIFEST,
    damage,
    file_damage,
    read_sealed,
    seal,
    sha256,
    sha256_of_file,
    write_sealed,
)


def test_hashes_are_sha256(tmp_path: Path) -> None:
    data = "é line\n".encode()
    (tmp_path / "a").write_bytes(data)
    expected = hashlib.sha256(data).hexdigest()
    assert sha256("é line\n") == sha256(data) == expected
    assert sha256_of_file(tmp_path / "a") == expected


def test_damage_of_a_file(tmp_path: Path) -> None:
    path, digest = tmp_path / "a.bin", sha256("some")
    assert file_damage(path, 4, digest) == "a.bin is missing"
    path.write_text("some")
    assert file_damage(path, 4, digest) is None
    assert file_damage(path, 5, digest) == "a.bin has 4 bytes, not 5"
    path.write_text("same")
    found = file_damage(path, 4, digest)
    assert found is not None
    assert found.startswith(f"a.bin is not what was written (SHA-256 {sha256('same')[:16]}, not")
    assert file_damage(path, 4) is None  # the size alone


def test_sealed_data(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    data: dict[str, Any] = {"b": [1, 2.5, None], "a": {"é": "x"}}
    write_sealed(path, data)
    assert read_sealed(path) == data
    for change in ({"b": []}, {"more": 1}, {"seal": "0"}):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        assert read_sealed(path) is None
        write_sealed(path, data)
    for content in (b"", b"\xff", b"[]", b"1", b"{}", b"[" * 100_000, b'{"seal": 1}'):
        path.write_bytes(content)
        assert read_sealed(path) is None


def test_a_sealed_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("one")
    (folder / "sub" / "b").write_text("two")
    assert damage(folder) == f"{MANIFEST} is missing"
    seal(folder)
    assert damage(folder) is None
    (folder / "sub" / "b").write_text("owt")
    assert str(damage(folder)).startswith("b is not what was written")
    (folder / "sub" / "b").unlink()
    assert damage(folder) == "b is missing"
    (folder / MANIFEST).write_text('{"files": 5}')
    assert str(damage(folder)).startswith("AttributeError")
