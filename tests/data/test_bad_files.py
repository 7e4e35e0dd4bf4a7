"""Files in other encodings, and files that cannot be read: all are named at once, or left out."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from softmax_rnn.cli.main import main
from softmax_rnn.data import CorpusError, PreparedCorpus, prepare
from softmax_rnn.data.tokenizer import byte_tokenizer

GOOD = "Ein Satz, der überall lesbar ist.\r\n" * 40
FILES = {
    "a.txt": "café\r\n".encode("latin-1") * 30,
    "b.txt": GOOD.encode(),
    "c.txt": "Größe\n".encode("utf-16") * 1,
    "d.jsonl": b'{"txt": "another key"}\n',
    "e.txt.gz": gzip.compress(b"cut short" * 99)[:-9],
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def _prepared(folder: Path, **options: Any) -> PreparedCorpus:
    return prepare(str(folder), byte_tokenizer(), cache=folder.parent / "cache", **options)


def _text(corpus: PreparedCorpus) -> set[str]:
    ids = [i for split in ("train", "test") for i in corpus.tokens(split)[:].tolist()]
    documents = "".join("\0" if i == 256 else chr(i) for i in ids).split("\0")
    return {text.encode("latin-1").decode() for text in documents if text}


def test_all_bad_files_are_named_at_once(mixed: Path) -> None:
    with pytest.raises(CorpusError) as caught:
        _prepared(mixed)
    first, *named, advice = str(caught.value).splitlines()
    assert first.startswith("4 of 5 files of the corpus ")
    for line, (name, why) in zip(
        named,
        [
            ("a.txt", r"is not text in UTF-8 (byte 0xe9: invalid continuation byte)."),
            ("c.txt", "is not text in UTF-8, but begins as UTF-16 does."),
            ("d.jsonl", "line 1: no text under 'text' (found: keys ['txt'])"),
            ("e.txt.gz", "Cannot read the corpus file"),
        ],
        strict=True,
    ):
        assert name in line
        assert why in line
    assert "encoding=" in advice
    assert "bad_files=skip" in advice
    assert not list((mixed.parent / "cache").glob("*corpus-*/*"))


def test_of_many_bad_files_twenty_are_named(tmp_path: Path) -> None:
    for number in range(23):
        (tmp_path / f"{number:02}.txt").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match=r"(?s)23 of 23 .*19\.txt.*\n  and 3 more\n") as caught:
        _prepared(tmp_path, bad_files="skip")  # nothing would be left
    assert "20.txt" not in str(caught.value)


def test_bad_files_are_left_out_and_told(mixed: Path) -> None:
    corpus = _prepared(mixed, bad_files="skip")
    source = corpus.manifest["source"]
    assert source["files"] == 1
    assert [Path(name).name for name in source["skipped"]] == [
        "a.txt",
        "c.txt",
        "d.jsonl",
        "e.txt.gz",
    ]
    # The same tokens as without these files.
    alone = _prepared(mixed / "b.txt")
    for split in ("train", "test"):
        assert alone.manifest[split]["sha256"] == corpus.manifest[split]["sha256"]


def test_every_file_has_the_first_encoding_that_fits(mixed: Path) -> None:
    for name in ("d.jsonl", "e.txt.gz"):
        (mixed / name).unlink()
    for number in range(20):  # so that no passages are drawn
        (mixed / f"{number:02}.txt").write_text(f"{number}")
    corpus = _prepared(mixed, encoding="utf-8, UTF-16,cp1252")
    source = corpus.manifest["source"]
    assert {Path(k).name: v for k, v in source["encodings"].items()} == {
        "a.txt": "cp1252",
        "c.txt": "utf-16",
    }
    assert corpus.manifest["encoding"] == "utf-8,utf-16,cp1252"
    assert _text(corpus) == {GOOD, "café\r\n" * 30, "Größe\n", *map(str, range(20))}


@pytest.mark.parametrize("name", ["utf-80", "", "rot13", "utf-8,", "\0", "utf-8,hex"])
def test_an_unknown_encoding_is_an_error(mixed: Path, name: str) -> None:
    with pytest.raises(ValueError, match="which is no encoding of text"):
        _prepared(mixed, encoding=name)


def test_half_a_surrogate_pair_of_another_encoding_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\\ud800" * 99)
    with pytest.raises(CorpusError, match="is not text in UNICODE-ESCAPE.*surrogates"):
        _prepared(tmp_path / "a.txt", encoding="unicode_escape")


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "{}"],
        ["compare", "softmax", "--dry-run", "--corpus", "{}", "--out", "{}/out"],
        ["reproduce", "figure4", "--dry-run", "--with", "corpus={}", "--out", "{}/out"],
    ],
)
def test_commands_name_and_leave_out_bad_files(
    words: list[str], mixed: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(mixed.parent / "cache"))
    words = [word.format(mixed) for word in words]
    assert main(words) == 2
    told = capsys.readouterr()
    assert all(name in told.err for name in FILES if name != "b.txt")
    assert told.out == ""
    option = "bad_files=skip" if words[0] == "reproduce" else "--bad-files skip"
    assert f"; {option} leaves them out" in told.err
    where = words.index(f"corpus={mixed}") + 1 if words[0] == "reproduce" else len(words)
    words[where:where] = option.split()
    assert main(words) == 0
    told = capsys.readouterr()
    assert "4 files cannot be read and are left out: " in told.err.replace("\n", " ")
