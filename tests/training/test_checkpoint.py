"""Checkpoints: what is in them, which are kept, which are trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softmax_rnn._utils.integrity import damage, seal
from softmax_rnn.training import train
from softmax_rnn.training.checkpoint import CheckpointError, newest_whole
from softmax_rnn.training.folder import RunFolder
from tiny import tiny


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A sealed folder with a file in a folder of it, as shards of several processes are."""
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / "parts").mkdir(parents=True)
    (checkpoint / "weights").write_bytes(bytes(range(256)))
    (checkpoint / "parts" / "0").write_bytes(b"zero")
    seal(checkpoint)
    return checkpoint


def test_every_bit_counts(sealed: Path) -> None:
    assert damage(sealed) is None
    for name in ("weights", "parts/0"):
        whole = (sealed / name).read_bytes()
        for place in range(len(whole)):
            (sealed / name).write_bytes(
                whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            )
            assert f"{Path(name).name} is not what was written (SHA-256" in str(damage(sealed))
        (sealed / name).write_bytes(whole)
    (sealed / "parts" / "0").unlink()
    assert damage(sealed) == "0 is missing"


def test_a_file_of_tensors_that_is_not_listed_counts_as_damage(sealed: Path) -> None:
    (sealed / "notes.txt").touch()
    assert damage(sealed) is None
    (sealed / "parts" / "more.safetensors").touch()
    assert damage(sealed) == "more.safetensors is not listed in manifest.json"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"weights": {}}}', '{"files": 3}'])
def test_a_manifest_that_says_nothing(sealed: Path, text: str) -> None:
    (sealed / "manifest.json").write_text(text)
    assert damage(sealed)


def test_the_newest_whole_one(sealed: Path) -> None:
    older = sealed.with_name("checkpoint-2")
    assert newest_whole([]) == (None, {})
    assert newest_whole([sealed]) == (sealed, {})
    older.mkdir()
    with pytest.raises(CheckpointError, match="checkpoint-2: manifest.json is missing"):
        newest_whole([older])
    assert newest_whole([sealed, older]) == (sealed, {"checkpoint-2": "manifest.json is missing"})


def test_a_checkpoint_holds_no_pickle(texts: Path, tmp_path: Path) -> None:
    folder = train(tiny(texts, steps=4), tmp_path / "run")
    (checkpoint,) = folder.checkpoints
    names = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in names} == {".json", ".jsonl", ".safetensors"}
    assert "model.safetensors" in names
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert set(listed) == names - {"manifest.json"}


def test_a_checkpoint_of_an_earlier_version_is_named(texts: Path, tmp_path: Path) -> None:
    folder = train(tiny(texts), tmp_path / "run")
    (folder.path / "summary.json").unlink()
    for checkpoint in folder.checkpoints:
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "progress.json").write_text('{"loss_sums": [1.0]}')
        seal(checkpoint)
    with pytest.raises(CheckpointError, match="checkpoint-12 was written by an earlier version"):
        train(tiny(texts), folder.path, resume=True)


def test_only_whole_ones_are_counted_and_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (4, 8, 12, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "old").touch()
    made = tmp_path / ".checkpoint-12.parts" / "checkpoint-12"
    made.mkdir(parents=True)
    (made / "new").touch()
    folder.add_checkpoint(made, keep=2)
    assert [path.name for path in folder.checkpoints] == [f"checkpoint-{i}" for i in (8, 12, 30)]
    assert [path.name for path in (tmp_path / "checkpoint-12").iterdir()] == ["new"]


def test_a_damaged_one_pushes_no_whole_one_out(texts: Path, tmp_path: Path) -> None:
    folder = train(tiny(texts, steps=12, save_every=4, keep_checkpoints=2), tmp_path / "run")
    assert [path.name for path in folder.checkpoints] == ["checkpoint-8", "checkpoint-12"]
    (folder.path / "summary.json").unlink()
    for _ in range(2):  # the second time the place is taken
        (folder.checkpoints[-1] / "model.safetensors").write_bytes(b"")
        train(tiny(texts, steps=12, save_every=2, keep_checkpoints=2), folder.path, resume=True)
        (folder.path / "summary.json").unlink()
        assert [path.name for path in folder.checkpoints] == ["checkpoint-10", "checkpoint-12"]
        assert (folder.path / "checkpoint-12.damaged").is_dir()


def test_rows_go_on_from_the_checkpoints_own(texts: Path, tmp_path: Path) -> None:
    """Whatever became of the files since."""
    folder = train(tiny(texts), tmp_path / "run")
    expected = folder.evaluations
    (folder.path / "summary.json").unlink()
    (folder.path / "evaluations.jsonl").unlink()
    (folder.path / "metrics.jsonl").write_text('{"step": 1, "loss": 7.0}\n')
    train(tiny(texts), folder.path, resume=True)
    assert folder.evaluations.equals(expected)
    assert list(folder.metrics.step) == [2, 4, 6, 8, 10, 12]
