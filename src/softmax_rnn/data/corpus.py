"""Documents out of local files: text, JSON lines and Parquet, plain or compressed."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

import pyarrow.parquet
from fsspec.compression import compr
from fsspec.utils import infer_compression

STDLIB = "stdlib"
PASSAGE = 2**20  # characters of a long text read at once
# Tests and bundled packages differ between distributions of Python; the library hardly does.
_STDLIB_SKIPS = {
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idle_test",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}


class CorpusError(ValueError):
    """A corpus that cannot be read or used; the message names the file."""


class Passage(NamedTuple):
    """A document, or a piece of a long one.

    Attributes:
        text: never empty, unless the document is.
        ends: whether the document ends with it.
        share: share of the file that was read by then, 0 to 1.
    """

    text: str
    ends: bool
    share: float


def corpus_files(corpus: str) -> list[Path]:
    """The files of a corpus, sorted.

    Args:
        corpus: ``stdlib`` (the source text of this Python's standard library), a file, a folder
            (every file below it) or a glob (``**`` reaches into folders). Folders and globs leave
            out hidden files and empty ones.

    Raises:
        CorpusError: if there is none, or the one named is empty.
    """
    if Path(corpus).is_file():  # whatever wildcards its name may hold
        if Path(corpus).stat().st_size == 0:
            raise CorpusError(f"The corpus file {corpus} is empty.")
        return [Path(corpus)]
    if corpus == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            path
            for path in root.rglob("*.py")
            if not _STDLIB_SKIPS.intersection(path.relative_to(root).parts)
        ]
    elif corpus and Path(corpus).is_dir():  # Path("") would be the folder one is in
        files = [
            path
            for path in Path(corpus).rglob("*")
            if not any(part.startswith(".") for part in path.relative_to(corpus).parts)
        ]
    else:
        files = [Path(name) for name in glob.glob(corpus, recursive=True)]
    files = [path for path in files if path.is_file() and path.stat().st_size > 0]
    if not files:
        raise CorpusError(
            f"No file matches the corpus {corpus!r} (empty and hidden ones left out). Give "
            f"'{STDLIB}', a file, a folder, a glob such as 'texts/**/*.jsonl', or "
            "'hf:owner/name' for a dataset of the Hugging Face Hub."
        )
    return sorted(files)


def is_text(path: Path) -> bool:
    """Whether the file is one document, and not rows of them."""
    return _reader(path) is _read_text


def read_passages(path: Path, text_column: str) -> Iterator[Passage]:
    """The documents of one file: every row of JSON lines or Parquet, the whole of a text file.

    Args:
        path: ``.jsonl``, ``.json`` or ``.parquet``; anything else is text in UTF-8. ``.gz``,
            ``.zst`` and the like on top of text and JSON lines are unpacked on the fly.
        text_column: the key or column that holds the text.

    Yields:
        Rows whole; text in passages of about ``PASSAGE`` characters, cut at the ends of lines.

    Raises:
        CorpusError: naming the file, and the line or the columns.
    """
    try:
        yield from _reader(path)(path, text_column)
    except CorpusError:
        raise
    except UnicodeDecodeError as error:
        raise CorpusError(f"The corpus file {path} is not text in UTF-8: {error}.") from error
    except Exception as error:  # every unpacker and parser has errors of its own
        raise CorpusError(f"Cannot read the corpus file {path}: {error}") from error


_Reader = Callable[[Path, str], Iterator[Passage]]


def _reader(path: Path) -> _Reader:
    packed = infer_compression(path.name)
    reader = _READERS.get((path.with_suffix("") if packed else path).suffix, _read_text)
    if packed and reader is _read_parquet:
        raise CorpusError(f"{path} is Parquet packed with {packed}: unpack it first.")
    return reader


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """The file as text, and the share of its bytes that was read."""
    packed, size = infer_compression(path.name), path.stat().st_size
    with path.open("rb") as raw:
        data: BinaryIO = raw
        if packed == "zstd":  # reads on after a frame, and tells one that is cut short
            data = pyarrow.CompressedInputStream(raw, "zstd")
        elif packed:
            if packed == "zip" and (files := len(zipfile.ZipFile(raw).namelist())) != 1:
                raise CorpusError(f"{path} is an archive of {files} files, not of one: unpack it.")
            data = compr[packed](raw, mode="r")
        with io.TextIOWrapper(data, encoding="utf-8") as text:
            yield text, lambda: raw.tell() / max(size, 1)


def _read_text(path: Path, _: str) -> Iterator[Passage]:
    with _unpacked(path) as (file, share):
        text = file.read(PASSAGE) + file.readline(PASSAGE)
        while True:
            more = file.read(PASSAGE) + file.readline(PASSAGE)
            yield Passage(text, not more, share())
            if not more:
                return
            text = more


def _read_json_lines(path: Path, column: str) -> Iterator[Passage]:
    with _unpacked(path) as (file, share):
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{path}, line {number}: not JSON ({error}).") from error
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise CorpusError(
                    f"{path}, line {number}: no text under {column!r} (found: {_short(found)}); "
                    "name its key with --text_column."
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CorpusError(
                    f"{path}, line {number}: the text under {column!r} holds half a surrogate "
                    f"pair ({error})."
                ) from error
            yield Passage(text, True, share())


def _read_parquet(path: Path, column: str) -> Iterator[Passage]:
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise CorpusError(
                f"{path} has no column {column!r} (found: {_short(', '.join(names))}); "
                "name it with --text_column."
            )
        done = 0
        for batch in file.iter_batches(columns=[column], batch_size=1000):
            done += len(batch)
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise CorpusError(
                        f"{path}: column {column!r} holds {_short(repr(text))}, not text."
                    )
                yield Passage(text, True, done / file.metadata.num_rows)


def _short(words: str) -> str:
    """At most 200 characters on one line."""
    words = " ".join(words.split())
    return words if len(words) <= 200 else f"{words[:200]}..."


_READERS: dict[str, _Reader] = {
    ".json": _read_json_lines,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}


def read_documents(path: Path, text_column: str) -> Iterator[str]:
    """The documents of :func:`read_passages`, whole."""
    held: list[str] = []
    for passage in read_passages(path, text_column):
        held.append(passage.text)
        if passage.ends:
            yield "".join(held)
            held.clear()
