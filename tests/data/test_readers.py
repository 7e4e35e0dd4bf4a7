"""Reading documents, and saying which file cannot be read."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from softmax_rnn.data.readers import (
    CorpusError,
    corpus_files,
    documents,
    read_docstrings,
    read_passages,
)

DOCUMENTS = ["one\ntwo", "drei – vier", "五"]


def read_documents(path: Path, column: str) -> Iterator[str]:
    return documents(read_passages(path, column))


def json_lines() -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in DOCUMENTS).encode()


def test_json_lines(tmp_path: Path) -> None:
    files = {
        "a.jsonl": json_lines(),
        "a.jsonl.gz": gzip.compress(json_lines()),
        "a.jsonl.zst": zstandard.compress(json_lines()),
        "frames.jsonl.zst": b"".join(
            zstandard.compress(line) for line in json_lines().splitlines(keepends=True)
        ),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        assert list(read_documents(tmp_path / name, "text")) == DOCUMENTS, name


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": DOCUMENTS, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert list(read_documents(tmp_path / "a.parquet", "body")) == DOCUMENTS


def test_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(DOCUMENTS[1])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(DOCUMENTS[2].encode()))
    assert list(read_documents(tmp_path / "a.md", "text")) == [DOCUMENTS[1]]
    assert list(read_documents(tmp_path / "b.txt.gz", "text")) == [DOCUMENTS[2]]


def test_files_of_a_corpus(texts: Path) -> None:
    assert len(corpus_files(str(texts))) == 40
    assert corpus_files(str(texts / "0[12].txt")) == [texts / "01.txt", texts / "02.txt"]
    assert corpus_files(str(texts / "03.txt")) == [texts / "03.txt"]


@pytest.mark.parametrize(
    ("corpus", "suffix", "size"),
    [("stdlib", ".py", 8e6), ("torch-headers", ".h", 8e6), ("docstrings", ".py", 2e7)],
)
def test_corpora_that_are_installed(
    corpus: str, suffix: str, size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = corpus_files(corpus)
    assert {path.suffix for path in files} == {suffix}
    assert len(set(files)) == len(files)
    assert sum(path.stat().st_size for path in files) > size
    assert not [path for path in files if {"site-packages", "tests"} <= set(path.parts)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / corpus).write_text("a file of the same name")
    assert corpus_files(corpus) == files
    assert corpus_files(f"./{corpus}") == [Path(corpus)]


def test_docstrings_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '''"""The module\\d."""

def first():
    """First.

    Plain.
        Indented.
    """
    def inner(): "Inner."

async def second(): "no \\ud800 half"

class Third:
    x = """not a docstring"""
    def method(self):
        """Method, été."""
'''
    )
    (document,) = documents(read_docstrings(tmp_path / "a.py", ""))
    assert document == (
        "The module\\d.\n\nFirst.\n\nPlain.\n    Indented.\n\nInner.\n\nno ? half\n\nMethod, été."
    )
    for content in (b"print 5\n", b"\0", b"\xff"):
        (tmp_path / "a.py").write_bytes(content)
        assert list(read_docstrings(tmp_path / "a.py", "")) == []


def test_folders_and_globs_leave_out_what_is_hidden_or_empty(texts: Path) -> None:
    (texts / ".git").mkdir()
    for name in (".git/config", ".DS_Store", "00.txt~"):
        (texts / name).write_text("no text of the corpus")
    (texts / "00.txt~").write_text("")
    (texts / "05.txt").write_text("")
    again = texts.parent / "**" / "**" / "*.txt"  # which finds files several times
    for corpus in (texts, texts / "*", again):
        assert [path.name for path in corpus_files(str(corpus))] == [
            f"{i:02}.txt" for i in range(40) if i != 5
        ]


def test_a_file_is_a_file_whatever_its_name(texts: Path) -> None:
    (texts / "b[1].txt").write_text("text")
    assert corpus_files(str(texts / "b[1].txt")) == [texts / "b[1].txt"]
    (texts / "a.jsonl.txt").write_text("no JSON")
    assert list(read_documents(texts / "a.jsonl.txt", "text")) == ["no JSON"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1: .*half a surrogate"),
        ("a.parquet.gz", b"", "a.parquet.gz is Parquet compressed with gzip: decompress it first"),
        ("a.txt", b"\xff\xfe\x00", "a.txt is not text in UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{oops\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "no text under 'text' .found: keys .'body'.*text_column"),
        ("a.jsonl", b"[1]\n", r"found: \[1\]\); name"),
        ("a.jsonl.gz", b"not gzip", "Cannot read the corpus file .*a.jsonl.gz"),
        ("a.jsonl.zst", b"not zstd", "Cannot read the corpus file .*a.jsonl.zst"),
        ("a.jsonl.zst", zstandard.compress(json_lines() * 99)[:-3], "a.jsonl.zst: Truncated"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON"),
        (
            "a.jsonl",
            b'{"%s": 1}' % (b"long " * 999),
            r"found: keys \['long long .{188}\.\.\.\); name its key",
        ),
        ("a.parquet", b"not parquet", "Cannot read the corpus file .*a.parquet"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=message):
        list(read_documents(tmp_path / name, "text"))


@pytest.mark.parametrize("members", [0, 1, 2])
def test_an_archive_of_one_file_is_that_file(tmp_path: Path, members: int) -> None:
    path = tmp_path / "a.jsonl.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(members):
            archive.writestr(f"{index}.jsonl", json_lines())
    if members == 1:
        assert list(read_documents(path, "text")) == DOCUMENTS
        return
    with pytest.raises(CorpusError, match=f"a.jsonl.zip is an archive of {members} files"):
        list(read_documents(path, "text"))


def test_parquet_without_the_column_lists_the_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="no column 'text' .found: .'body'"):
        list(read_documents(tmp_path / "a.parquet", "text"))
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), tmp_path / "b.parquet")
    with pytest.raises(CorpusError, match="contains None, not text"):
        list(read_documents(tmp_path / "b.parquet", "text"))


def test_empty_and_missing_files_are_named(texts: Path) -> None:
    (texts / "05.txt").write_text("")
    with pytest.raises(CorpusError, match="05.txt is empty"):
        corpus_files(str(texts / "05.txt"))
    with pytest.raises(CorpusError, match="No file matches the corpus ''"):
        corpus_files("")
    with pytest.raises(CorpusError, match=r"No file matches the corpus .*\*.json"):
        corpus_files(str(texts / "*.json"))
    with pytest.raises(CorpusError, match=r"'stdlib', 'torch-headers', 'docstrings', or 'hf:"):
        corpus_files("docstring")


def test_an_installation_without_headers_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__path__", [str(tmp_path)])
    with pytest.raises(CorpusError, match=r"'torch-headers' needs the files .*ATen.*\*\.h"):
        corpus_files("torch-headers")
