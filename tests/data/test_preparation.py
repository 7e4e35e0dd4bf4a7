"""Preparing corpora in many shards: killed, damaged, truncated, with any number of threads."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softmax_rnn.data.preparation as preparation
import softmax_rnn.data.shards as shards_module
import softmax_rnn.data.tokenise as tokenise
from softmax_rnn.data import CorpusError, PreparedCorpus, Progress, TokenBlocks, prepare
from softmax_rnn.data.draws import held_out
from softmax_rnn.data.tokenizer import byte_tokenizer

SMALL: dict[str, Any] = {"shard_tokens": 4000, "test_fraction": 0.1, "workers": 1}


STRETCHES = ".*/stretch-*.json"


def prepare_slowly(corpus: str, cache: Path, seconds: float, most: int) -> None:
    """In a process of its own; after more than ``most`` stretches it waits to be killed."""

    def progress(_: Progress) -> None:
        time.sleep(seconds)
        while len(list(cache.glob(STRETCHES))) > most:
            time.sleep(1)

    prepare(corpus, byte_tokenizer(), progress=progress, cache=cache, **SMALL)


def start(*args: Any) -> Any:
    """A process that need not import everything again."""
    process = multiprocessing.get_context("fork").Process(target=prepare_slowly, args=args)
    process.start()
    return process


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """300 documents of about 150 characters."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"{i} é " + "state key " * (i % 29)}) for i in range(300)]
    path.write_text("\n".join(lines))
    return path


def files(corpus: PreparedCorpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.folder.iterdir()}


def documents(corpus: PreparedCorpus, split: str) -> list[str]:
    stream = corpus.tokens(split)[:]
    pieces = np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]
    return [bytes(piece[:-1].tolist()).decode() for piece in pieces]


@pytest.mark.usefixtures("scale")
def test_shards_hold_the_documents_in_order(rows: Path, tmp_path: Path) -> None:
    corpus = prepare(str(rows), byte_tokenizer(), cache=tmp_path, **SMALL)
    written = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    test = held_out(123, 0.1, np.arange(300))
    for split, chosen in (("train", ~test), ("test", test)):
        expected = [text for text, mine in zip(written, chosen, strict=True) if mine]
        assert documents(corpus, split) == expected
        manifest = corpus.manifest[split]
        assert manifest["documents"] == len(expected)
        assert manifest["tokens"] == sum(len(text.encode()) + 1 for text in expected)
        starts = corpus.maps(split, ".idx", "int64")
        for shard, tokens, begin in zip(
            manifest["shards"], corpus.tokens(split).shards, starts, strict=True
        ):
            assert len(tokens) == shard["tokens"]
            assert list(begin[1:]) == list(np.flatnonzero(tokens == 256)[:-1] + 1)
            assert begin[0] == 0
    assert len(corpus.manifest["train"]["shards"]) > 8
    corpus.verify()


def test_the_manifest_says_what_it_is(rows: Path, tmp_path: Path) -> None:
    manifest = prepare(str(rows), byte_tokenizer(), cache=tmp_path).manifest
    assert manifest["format"] == 3
    assert manifest["corpus"] == str(rows)
    assert (manifest["tokenizer_name"], len(manifest["tokenizer"])) == ("bytes", 64)
    assert (manifest["dtype"], manifest["vocab_size"], manifest["end_of_text"]) == (
        "uint16",
        257,
        256,
    )
    assert (manifest["test_fraction"], manifest["split_seed"], manifest["max_tokens"]) == (
        0.02,
        123,
        None,
    )
    assert manifest["source"] == {"files": 1, "skipped": {}, "encodings": {}}
    assert [shard["name"] for shard in manifest["test"]["shards"]] == ["test-00000"]
    assert manifest["test"]["documents"] == 6
    # Of a single shard, the hash is that of the token stream.
    assert manifest["train"]["sha256"] == manifest["train"]["shards"][0]["sha256"]


@pytest.mark.usefixtures("scale")
def test_killed_three_times_is_undisturbed_whatever_the_workers(rows: Path, tmp_path: Path) -> None:
    expected = prepare(str(rows), byte_tokenizer(), cache=tmp_path / "a", **SMALL)
    cache = tmp_path / "b"
    stamps: dict[str, int] = {}
    done = 0
    for kill in range(3):
        wanted = done + 2
        process = start(str(rows), cache, 0.02, wanted)
        while process.is_alive() and len(list(cache.glob(STRETCHES))) < wanted:
            time.sleep(0.001)
        time.sleep(0.03 * kill)  # in the middle of the next shard
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not list(cache.glob("corpus-*"))
        records = [json.loads(path.read_text()) for path in cache.glob(STRETCHES)]
        names = [
            found["name"] for r in records for split in r["shards"].values() for found in split
        ]
        now = {n: next(cache.glob(f".*/{n}.bin")).stat().st_mtime_ns for n in names}
        assert len(records) >= wanted
        assert stamps.items() <= now.items()  # no finished shard was written again
        stamps, done = now, len(records)
    found = prepare(str(rows), byte_tokenizer(), cache=cache, **{**SMALL, "workers": 2})
    for name, stamp in stamps.items():
        assert (found.folder / f"{name}.bin").stat().st_mtime_ns == stamp
    assert files(found) == files(expected)


@pytest.mark.usefixtures("scale")
def test_a_full_disk_leaves_no_half_shard(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare(str(rows), byte_tokenizer(), cache=tmp_path / "a", **SMALL)
    original, calls = shards_module._Shard.add, 0

    def add(self: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        original(self, *args)
        if calls == 30:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards_module._Shard, "add", add)
    with pytest.raises(OSError, match="No space left .*Finished shards are kept: free some space"):
        prepare(str(rows), byte_tokenizer(), cache=tmp_path / "b", **SMALL)
    kept = [path.name for path in (tmp_path / "b").glob(".corpus-*/*")]
    assert "train-00000.bin" in kept
    assert not list((tmp_path / "b").glob(".corpus-*/.*"))
    monkeypatch.undo()
    monkeypatch.setattr(tokenise, "_CHARACTERS", 900)
    monkeypatch.setattr(preparation, "_SMALL", 2000)
    assert files(prepare(str(rows), byte_tokenizer(), cache=tmp_path / "b", **SMALL)) == files(
        expected
    )


@pytest.mark.usefixtures("scale")
def test_a_truncated_shard_is_prepared_again(rows: Path, tmp_path: Path) -> None:
    expected = files(prepare(str(rows), byte_tokenizer(), cache=tmp_path / "a", **SMALL))
    seen = 0

    class Stop(Exception):  # noqa: N818
        pass

    def stop(progress: Progress) -> None:
        nonlocal seen
        seen += not progress.checking
        if seen == 40:
            raise Stop

    options: dict[str, Any] = {**SMALL, "cache": tmp_path / "b"}
    with pytest.raises(Stop):
        prepare(str(rows), byte_tokenizer(), progress=stop, **options)
    shard = next((tmp_path / "b").glob(".*/train-00001.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    assert files(prepare(str(rows), byte_tokenizer(), **options)) == expected


@pytest.mark.usefixtures("scale")
def test_damage_is_found_and_named(rows: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SMALL, "cache": tmp_path}
    corpus = prepare(str(rows), byte_tokenizer(), **options)
    shard = corpus.folder / "train-00002.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = prepare(str(rows), byte_tokenizer(), **options)  # the size is as it was
    with pytest.raises(
        CorpusError, match=r"train-00002.bin is not what was written .*delete the folder"
    ):
        again.verify()
    shard.write_bytes(whole[:-2])
    with pytest.raises(CorpusError, match=rf"train-00002.bin has {len(whole) - 2} bytes, not"):
        prepare(str(rows), byte_tokenizer(), **options)
    shard.write_bytes(whole)
    again.verify()
    (corpus.folder / "test-00000.idx").unlink()
    with pytest.raises(CorpusError, match=r"test-00000.idx is missing"):
        PreparedCorpus.open(corpus.folder)
    with pytest.raises(CorpusError, match=r"test-00000.idx is missing"):
        again.verify()
    (corpus.folder / "manifest.json").unlink()
    with pytest.raises(CorpusError, match=r"has lost its manifest.json: delete it"):
        prepare(str(rows), byte_tokenizer(), **options)


@pytest.mark.usefixtures("scale")
def test_an_intact_file_is_not_read_again(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a read-only folder, where that cannot be recorded."""
    made = prepare(str(rows), byte_tokenizer(), cache=tmp_path, **SMALL)
    read: list[str] = []
    check = PreparedCorpus._check_hashes

    def counted(self: PreparedCorpus, found: list[Any]) -> None:
        read.extend(path.name for path, _, _ in found)
        check(self, found)

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(PreparedCorpus, "_check_hashes", counted)
    monkeypatch.setattr(Path, "touch", refuse)
    corpus = PreparedCorpus.open(made.folder)
    time.sleep(0.01)
    shards = sorted(corpus.folder.glob("train-*"))
    for shard in shards:
        shard.write_bytes(shard.read_bytes())
    corpus.check_unchanged()
    assert sorted(read) == [shard.name for shard in shards]
    corpus.check_unchanged()
    assert len(read) == len(shards)
    time.sleep(0.01)
    shards[0].write_bytes(bytes(shards[0].stat().st_size))
    with pytest.raises(CorpusError, match=shards[0].name):
        corpus.check_unchanged()


def test_a_prepared_folder_is_a_corpus(rows: Path, tmp_path: Path) -> None:
    made = prepare(str(rows), byte_tokenizer(), cache=tmp_path / "cache")
    shutil.copytree(made.folder, tmp_path / "copy")
    rows.unlink()
    assert prepare(str(tmp_path / "copy"), byte_tokenizer()).manifest == made.manifest
    with pytest.raises(CorpusError, match=r"was prepared with test_fraction=0.02 .requested.*0.5"):
        prepare(str(tmp_path / "copy"), byte_tokenizer(), test_fraction=0.5)
    other = byte_tokenizer()
    other.add_tokens(["<more>"])
    with pytest.raises(CorpusError, match=r"prepared with another tokenizer, 'bytes'"):
        prepare(str(tmp_path / "copy"), other)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "manifest.json").write_text('{"text": "another file"}')
    assert prepare(str(tmp_path / "texts"), byte_tokenizer()).manifest["train"]["tokens"]
    manifest = tmp_path / "copy" / "manifest.json"
    manifest.write_text(json.dumps({**made.manifest, "format": 1}))
    with pytest.raises(CorpusError, match="was prepared in format 1, and this version reads 3"):
        prepare(str(tmp_path / "copy"), byte_tokenizer())


@pytest.mark.parametrize("small", [True, False])
def test_max_tokens_stops_after_the_document_that_reaches_it(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if not small:
        monkeypatch.setattr(tokenise, "_CHARACTERS", 500)
        monkeypatch.setattr(preparation, "_SMALL", 2000)
    options: dict[str, Any] = {**SMALL, "cache": tmp_path, "max_tokens": 10_000}
    corpus = prepare(str(rows), byte_tokenizer(), **options)
    found = {text for split in ("train", "test") for text in documents(corpus, split)}
    written = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    lengths = np.cumsum([len(text.encode()) + 1 for text in written])
    assert found == set(written[: int(np.searchsorted(lengths, 10_000)) + 1])
    with pytest.raises(ValueError, match="max_tokens must be greater than or equal to 1, not 0"):
        prepare(str(rows), byte_tokenizer(), **{**options, "max_tokens": 0})


@pytest.mark.usefixtures("scale")
def test_a_long_text_is_read_in_passages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softmax_rnn.data.readers.PASSAGE", 100)
    text = "".join(f"line {i} é\r\n" if i % 2 else f"line {i}\n" for i in range(900))
    (tmp_path / "book.txt").write_bytes(text.encode())
    corpus = prepare(str(tmp_path / "book.txt"), byte_tokenizer(), cache=tmp_path, **SMALL)
    passages = sum(corpus.manifest[split]["passages"] for split in ("train", "test"))
    assert passages > 80
    tokens = np.concatenate([corpus.tokens("train")[:], corpus.tokens("test")[:]])
    assert (tokens == 256).sum() == 1  # the book ends once
    assert len(tokens) == len(text.encode()) + 1
    assert 0.08 < corpus.manifest["test"]["passages"] / passages < 0.13


@pytest.mark.usefixtures("scale")
def test_long_documents_of_many_go_whole_to_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softmax_rnn.data.readers.PASSAGE", 100)
    books = tmp_path / "books"
    books.mkdir()
    for i in range(30):
        (books / f"{i:02}.txt").write_text(f"book {i}\n" * 40)
    corpus = prepare(str(books), byte_tokenizer(), cache=tmp_path, **SMALL)
    assert sorted(documents(corpus, "train") + documents(corpus, "test")) == sorted(
        path.read_text() for path in books.iterdir()
    )
    assert len(documents(corpus, "test")) == 3


@pytest.mark.usefixtures("scale")
def test_blocks_run_over_the_ends_of_shards(rows: Path, tmp_path: Path) -> None:
    corpus = prepare(str(rows), byte_tokenizer(), cache=tmp_path, **SMALL)
    stream = corpus.tokens("train")
    whole = np.concatenate(stream.shards)
    blocks = TokenBlocks(corpus, "train", 700)
    assert len(blocks) == len(whole) // 700
    for index in range(len(blocks)):
        expected = torch.from_numpy(whole[index * 700 : (index + 1) * 700].astype(np.int64))
        assert torch.equal(blocks[index]["input_ids"], expected)
    assert np.array_equal(stream[1:-1], whole[1:-1])
    assert np.array_equal(stream[2:9999], whole[2:9999])  # over three shards
    assert np.shares_memory(blocks.block(0), blocks.stream.shards[0])  # no copy
    with pytest.raises(IndexError, match=f"Block {len(blocks)} of {len(blocks)}"):
        blocks[len(blocks)]


@pytest.mark.usefixtures("scale")
def test_progress_of_a_corpus_at_scale(rows: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    corpus = prepare(str(rows), byte_tokenizer(), cache=tmp_path, progress=seen.append, **SMALL)
    checking = [progress for progress in seen if progress.checking]
    assert seen[: len(checking)] == checking
    seen = seen[len(checking) :]
    for part in (checking, seen):
        shares = [progress.share or 0 for progress in part]
        assert shares == sorted(shares)
        assert shares[-1] > 0.99
    assert seen[-1].tokens == sum(corpus.manifest[split]["tokens"] for split in ("train", "test"))
    assert all(progress.tokens_per_second > 0 for progress in seen)


@pytest.mark.usefixtures("scale")
def test_two_at_once_make_one(rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for process in [start(str(rows), cache, 0.01, 10**9) for _ in range(2)]:
        process.join()
        assert process.exitcode == 0
    folder = next(cache.glob("corpus-*"))
    assert list(cache.iterdir()) == [folder]
