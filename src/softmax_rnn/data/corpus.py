"""Documents out of local files: text, JSON lines and Parquet, plain or compressed."""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow.parquet
from fsspec.utils import infer_compression

STDLIB = "stdlib"
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
    """A corpus that cannot be read; the message names the file."""


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
            f"'{STDLIB}', a file, a folder or a glob such as 'texts/**/*.jsonl'."
        )
    return sorted(files)


def read_documents(path: Path, text_column: str) -> Iterator[str]:
    """The documents of one file: every row of JSON lines or Parquet, the whole of a text file.

    Args:
        path: ``.jsonl``, ``.json`` or ``.parquet``; anything else is text in UTF-8. ``.gz``,
            ``.zst`` and the like on top of text and JSON lines are unpacked on the fly.
        text_column: the key or column that holds the text.

    Raises:
        CorpusError: naming the file, and the line or the columns.
    """
    packed = infer_compression(path.name)
    reader = _READERS.get((path.with_suffix("") if packed else path).suffix, _read_text)
    if packed and reader is _read_parquet:
        raise CorpusError(f"{path} is Parquet packed with {packed}: unpack it first.")
    try:
        yield from reader(path, text_column)
    except CorpusError:
        raise
    except UnicodeDecodeError as error:
        raise CorpusError(f"The corpus file {path} is not text in UTF-8: {error}.") from error
    except Exception as error:  # every unpacker and parser has errors of its own
        raise CorpusError(f"Cannot read the corpus file {path}: {error}") from error


def _read_text(path: Path, _: str) -> Iterator[str]:
    with fsspec.open(path, "rt", encoding="utf-8", compression="infer") as file:
        yield file.read()


def _read_json_lines(path: Path, column: str) -> Iterator[str]:
    with fsspec.open(path, "rt", encoding="utf-8", compression="infer") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise CorpusError(f"{path}, line {number}: not JSON ({error}).") from error
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise CorpusError(
                    f"{path}, line {number}: no text under {column!r} (found: {found}); "
                    "name its key with --text_column."
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CorpusError(
                    f"{path}, line {number}: the text under {column!r} holds half a surrogate "
                    f"pair ({error})."
                ) from error
            yield text


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise CorpusError(
                f"{path} has no column {column!r} (found: {', '.join(names)}); "
                "name it with --text_column."
            )
        for batch in file.iter_batches(columns=[column]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise CorpusError(f"{path}: column {column!r} holds {text!r}, not text.")
                yield text


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".json": _read_json_lines,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
