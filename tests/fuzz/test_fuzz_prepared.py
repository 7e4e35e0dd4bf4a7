"""Prepared corpora whose manifest, shards or journal was changed: refused, or still right."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import softmax_rnn.data.preparation as preparation
import softmax_rnn.data.tokenise as tokenise
from fuzzing import damaged, mutated, outcome, snapshot
from softmax_rnn.data import CorpusError, DocumentRows, PreparedCorpus, Progress, TokenBlocks
from softmax_rnn.data import prepare as prepare_corpus
from softmax_rnn.data.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
OPTIONS: dict[str, Any] = {"shard_tokens": 700, "test_fraction": 0.1, "workers": 1}
SPLITS = ("train", "test")


class Made(NamedTuple):
    """A prepared corpus as bytes, half of its preparation, and its tokens."""

    source: Path
    files: dict[str, bytes]
    half: dict[str, bytes]
    tokens: dict[str, list[int]]
    key: str

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads(self.files["manifest.json"])


class StoppedError(Exception):
    """What ends a preparation half-way."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """A corpus of a few shards, at a scale where they are written one after the other."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise, "_CHARACTERS", 300)
        patch.setattr(preparation, "_SMALL", 500)
        source = folder / "rows.jsonl"
        lines = [json.dumps({"text": f"{i} é " + "key " * (i % 13)}) for i in range(90)]
        source.write_text("\n".join(lines))
        calls = 0

        def stop(progress: Progress) -> None:
            nonlocal calls
            calls += not progress.checking
            if calls == 6:
                raise StoppedError

        with pytest.raises(StoppedError):
            prepare(source, folder / "cache", progress=stop)
        (parts,) = (folder / "cache").glob(".corpus-*.parts")
        half = _bytes(parts)
        assert sum(name.startswith("stretch") for name in half) >= 2
        corpus = prepare(source, folder / "cache")
        tokens = {split: corpus.tokens(split)[:].tolist() for split in SPLITS}
        files = _bytes(corpus.folder)
        yield Made(source, files, half, tokens, corpus.folder.name)


def prepare(corpus: Path, cache: Path, **options: Any) -> PreparedCorpus:
    return prepare_corpus(str(corpus), TOKENIZER, cache=cache, **{**OPTIONS, **options})


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _written(files: dict[str, bytes], folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _used(folder: Path, cache: Path) -> tuple[PreparedCorpus, dict[str, list[int]]]:
    """The corpus, opened as a run does it, with all its rows of both kinds read once."""
    corpus = prepare(folder, cache)
    for split in SPLITS:
        for rows in (TokenBlocks(corpus, split, 16), DocumentRows(corpus, split, 16)):
            for index in range(len(rows)):
                row = rows[index]
                assert row["input_ids"].shape == (16,)
                assert int(row["input_ids"].min()) >= 0
                assert int(row["input_ids"].max()) < corpus.manifest["vocab_size"]
    return corpus, {split: corpus.tokens(split)[:].tolist() for split in SPLITS}


def _check(made: Made, folder: Path, names: str, *, same: bool) -> None:
    """The folder is refused in words, or holds the tokens; and nothing in it has changed."""
    before = snapshot(folder)
    found = outcome(lambda: _used(folder, folder.parent / "cache"), names=names)
    assert snapshot(folder) == before
    assert not (folder.parent / "cache").exists()
    if found.error is not None:
        return
    corpus, tokens = found.value
    whole = outcome(corpus.verify, names=str(folder)).error is None
    assert tokens == made.tokens or not (same or whole)


@st.composite
def _manifests(draw: st.DrawFn, manifest: dict[str, Any]) -> bytes:
    if draw(st.integers(0, 4)) == 0:
        return draw(damaged(json.dumps(manifest).encode()))
    data = draw(mutated(manifest))
    if draw(st.integers(0, 4)) == 0 and isinstance(data, dict):
        path = draw(st.sampled_from(["../train-00000", "/etc/passwd", "a/../train-00000", "."]))
        data = json.loads(json.dumps(manifest))
        data[draw(st.sampled_from(SPLITS))]["shards"][0]["name"] = path
    return json.dumps(data).encode()


@given(data=st.data())
def test_manifests(made: Made, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    text = data.draw(_manifests(made.manifest))
    base = tmp_path_factory.getbasetemp() / "manifest"
    folder = _written({**made.files, "manifest.json": text}, base / "corpus")
    _check(made, folder, str(folder), same=True)


@pytest.mark.parametrize("where", ["..", "absolute", "link", "name"])
def test_a_manifest_cannot_leave_its_folder(made: Made, tmp_path: Path, where: str) -> None:
    folder = _written(made.files, tmp_path / "inside" / "corpus")
    outside = tmp_path / "outside"
    outside.mkdir()
    for end in (".bin", ".idx"):
        shutil.copy(folder / f"train-00000{end}", outside)
    manifest = made.manifest
    names = {"..": "../../outside/train-00000", "absolute": str(outside / "train-00000")}
    manifest["train"]["shards"][0]["name"] = names.get(where, "train-00000")
    if where == "link":
        for end in (".bin", ".idx"):
            (folder / f"train-00000{end}").unlink()
            (folder / f"train-00000{end}").symlink_to(outside / f"train-00000{end}")
    if where == "name":
        manifest["train"]["shards"][0]["name"] = "other"
        for end in (".bin", ".idx"):
            os.link(outside / f"train-00000{end}", folder / f"other{end}")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"(manifest\.json|train-00000\.bin)"):
        PreparedCorpus.open(folder)
    (tmp_path / "link").symlink_to(_written(made.files, tmp_path / "elsewhere"))
    assert _used(tmp_path / "link", tmp_path / "cache")[1] == made.tokens  # a folder may be one


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["train"]["shards"].pop(), "train.tokens must be"),
        (
            lambda m: m["train"].update(shards=[]),
            "train.shards must have at least 1 item",
        ),
        (lambda m: m["test"]["shards"][0].update(sha256="0" * 64), "test.sha256 must be"),
        (
            lambda m: m["test"]["shards"][0].update(tokens="9"),
            r"test.shards\[0\].tokens must be a valid integer, not '9'",
        ),
        (lambda m: m["test"].pop("shards"), "test.shards is missing"),
        (lambda m: m.update(dtype="O"), "Unknown dtype 'O'. Allowed: uint16, uint32"),
        (lambda m: m.update(end_of_text=257), "end_of_text must be an id of the vocabulary"),
        (lambda m: m.update(train=[]), r"train must be a valid dictionary, not \[\]"),
    ],
)
def test_what_a_manifest_says_is_looked_at(
    made: Made, tmp_path: Path, change: Callable[[Any], Any], told: str
) -> None:
    manifest = made.manifest
    change(manifest)
    text = json.dumps(manifest).encode()
    folder = _written({**made.files, "manifest.json": text}, tmp_path / "corpus")
    with pytest.raises(CorpusError, match=rf"manifest\.json.*{told}"):
        PreparedCorpus.open(folder)


@pytest.mark.parametrize(
    ("name", "at", "told"),
    [
        ("train-00000.bin", 1, r"holds the id 65\d+ of 257 ids"),
        ("train-00000.idx", 15, "train-00000.idx is not a valid index"),
        ("train-00001.idx", 9, "train-00001.idx is not a valid index"),
    ],
)
def test_a_flipped_byte_is_told_where_it_is_read(
    made: Made, tmp_path: Path, name: str, at: int, told: str
) -> None:
    changed = bytearray(made.files[name])
    changed[at] = 255
    folder = _written({**made.files, name: bytes(changed)}, tmp_path / "corpus")
    with pytest.raises(CorpusError, match=told):
        _used(folder, tmp_path / "cache")


@given(data=st.data())
def test_shards(made: Made, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    names = sorted(name for name in made.files if name != "manifest.json")
    name = data.draw(st.sampled_from(names))
    changed = data.draw(damaged(made.files[name]))
    base = tmp_path_factory.getbasetemp() / "shards"
    folder = _written({**made.files, name: changed}, base / "corpus")
    _check(made, folder, str(folder), same=False)
    if changed != made.files[name]:
        with pytest.raises(CorpusError, match=name):
            PreparedCorpus(folder, made.manifest).verify()


@st.composite
def _halves(draw: st.DrawFn, half: dict[str, bytes]) -> dict[str, bytes]:
    name = draw(st.sampled_from(sorted(half)))
    action = draw(st.sampled_from(["mutate", "mutate", "damage", "delete"]))
    if action == "delete":
        return {key: data for key, data in half.items() if key != name}
    if action == "mutate" and name.endswith(".json"):
        return {**half, name: json.dumps(draw(mutated(json.loads(half[name])))).encode()}
    return {**half, name: draw(damaged(half[name]))}


@given(data=st.data())
def test_half_of_a_preparation(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    half = data.draw(_halves(made.half))
    cache = tmp_path_factory.getbasetemp() / "journal"
    shutil.rmtree(cache, ignore_errors=True)
    parts = _written(half, cache / f".{made.key}.parts")
    found = outcome(lambda: prepare(made.source, cache), names=str(parts))
    assert not [path for path in cache.rglob(".*") if path.suffix in (".bin", ".idx")]
    if found.error is not None:
        return
    assert [path.name for path in cache.iterdir()] == [made.key]
    files = _bytes(found.value.folder)
    if files != made.files:  # a shard of the right size is found by its hash
        with pytest.raises(CorpusError, match="is not what was written"):
            found.value.verify()
        assert files["manifest.json"] == made.files["manifest.json"]
