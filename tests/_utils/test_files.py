"""Writing that is never half done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from softmax_rnn._utils.files import remove_leftovers, require_writable, write_json, write_text


def test_a_write_that_fails_leaves_the_old_text_and_nothing_aside(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.txt", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_write_goes_through_nobodys_link(tmp_path: Path) -> None:
    """The temporary name is known, and others may write in a cache."""
    (tmp_path / "other").write_text("kept")
    (tmp_path / f".a.txt.{os.getpid()}").symlink_to(tmp_path / "other")
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "other").read_text() == "kept"
    assert (tmp_path / "a.txt").read_text() == "new"
    assert not (tmp_path / "a.txt").is_symlink()


def test_json_holds_numbers_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})


def test_whether_a_folder_could_be_written_to_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    require_writable(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match=r"Nothing can be written in .*file \(File exists\)"):
        require_writable(tmp_path / "file" / "below")


def test_leftovers_are_what_a_kill_left_aside(tmp_path: Path) -> None:
    kept = ["summary.json", ".hidden", "checkpoint-4", ".gitignore"]
    for name in (*kept, ".summary.json.77", ".checkpoint-4.77", ".checkpoint-4.parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / ".config.yaml.77").write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
