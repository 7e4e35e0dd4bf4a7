"""Read documents from local files: text, JSON lines and Parquet, plain or compressed.

The JSON reader of `datasets` does not replace the one below. On 150 MB it took 1.2 to 2.2 times as
long; it reads the number 5 as the text "5" and a missing key as null, and its errors give no line
of the file. Its Parquet reader is as fast as the one below and would save no code.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import glob
import importlib
import io
import json
import sysconfig
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from encodings.aliases import aliases
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import pyarrow.parquet
from fsspec.compression import compr
from fsspec.utils import infer_compression

from softmax_rnn._utils.errors import nearest, shown

PASSAGE = 2**20  # characters of a text file that are read at once
# Corpora that every installation has: their files are below these folders of these packages.
STDLIB, HEADERS, DOCSTRINGS = "stdlib", "torch-headers", "docstrings"
_INSTALLED: dict[str, tuple[tuple[str, ...], str]] = {
    STDLIB: ((STDLIB,), "*.py"),
    HEADERS: (("torch/include/ATen", "torch/include/c10", "torch/include/torch"), "*.h"),
    DOCSTRINGS: ((STDLIB, "numpy", "pandas", "torch"), "*.py"),
}
_SKIPPED = {
    # Distributions of Python differ in tests and bundled packages, but hardly in the library.
    *("__pycache__", "dist-packages", "site-packages"),
    *("ensurepip", "idle_test", "lib2to3", "test", "tests"),
    # Half of the headers' text is generated, one function like another.
    *("ops", "RedispatchFunctions.h", "RegistrationDeclarations.h", "VmapGeneratedPlumbing.h"),
}


class CorpusError(ValueError):
    """A corpus that cannot be read or used; the message names the file."""


class Passage(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends: bool  # whether the document ends with this passage
    share: float | None = None  # of the file or source that has been read, if it is known
    bookmark: dict[str, Any] | None = None  # where to start reading to reach this passage again


def corpus_files(corpus: str) -> list[Path]:
    """The files of a corpus, sorted.

    Args:
        corpus: a name of text that is installed with this package: ``stdlib`` (the source code of
            Python's standard library, 12 MB), ``torch-headers`` (C++, 13 MB) or ``docstrings``
            (English with examples of code, 12 MB: those of the standard library, numpy, pandas
            and torch; see :func:`read_docstrings`). Or a file, a folder (with its subfolders) or a
            glob (``**`` matches subfolders). Hidden and empty files of folders and globs are
            skipped. ``./stdlib`` is a folder or file that has such a name.

    Raises:
        CorpusError: if there is no file, or the named file is empty.
    """
    if corpus in _INSTALLED:
        return _installed_files(corpus)
    if Path(corpus).is_file():  # also if its name contains wildcards
        if Path(corpus).stat().st_size == 0:
            raise CorpusError(f"The corpus file {corpus} is empty.")
        return [Path(corpus)]
    if corpus and Path(corpus).is_dir():  # Path("") is the working folder
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
            f"No file matches the corpus {corpus!r} (hidden and empty files are skipped). Give a "
            f"file, a folder, a glob such as 'texts/**/*.jsonl', {', '.join(map(repr, _INSTALLED))}"
            ", or 'hf:owner/name' for a dataset of the Hugging Face Hub."
        )
    return sorted(set(files))  # a glob with several ** names a file several times


def _installed_files(corpus: str) -> list[Path]:
    """The files of a corpus that is installed: folder by folder, each sorted, none empty."""
    folders, pattern = _INSTALLED[corpus]
    files: list[Path] = []
    for name in folders:
        package, *below = name.split("/")
        stdlib = package == STDLIB
        base = (
            sysconfig.get_path("stdlib") if stdlib else importlib.import_module(package).__path__[0]
        )
        root = Path(base, *below)
        found = sorted(
            path
            for path in root.rglob(pattern)
            if not _SKIPPED.intersection(path.relative_to(root).parts) and path.stat().st_size > 0
        )
        if not found:
            raise CorpusError(f"The corpus {corpus!r} needs the files {root / '**' / pattern}.")
        files += found
    return files


def is_text(path: Path) -> bool:
    """Whether the file is one document, not a table of documents."""
    return _reader(path) is _read_text


def documents(passages: Iterable[Passage]) -> Iterator[str]:
    """Whole documents, joined from their passages."""
    texts: list[str] = []
    for passage in passages:
        texts.append(passage.text)
        if passage.ends:
            yield "".join(texts)
            texts.clear()


def encodings(names: str) -> list[str]:
    """Python's names of encodings that are given as ``utf-8,latin-1``.

    Raises:
        ValueError: for a name that is no encoding of text.
    """
    found = []
    for name in names.split(","):
        try:
            found.append(codecs.lookup(name.strip()).name)
            "".encode(found[-1])  # LookupError for codecs such as rot13, which are not of text
        except (LookupError, ValueError) as error:
            known = sorted({"utf-8", "utf-8-sig", *(x.replace("_", "-") for x in aliases.values())})
            raise ValueError(
                f"encoding={names!r} names {name!r}, which is no encoding of text."
                f"{nearest(name, known)} Examples: utf-8, utf-16, latin-1, cp1252."
            ) from error
    return found


def read_passages(path: Path, text_column: str, encoding: str = "utf-8") -> Iterator[Passage]:
    """The documents of one file: each row of JSON lines or Parquet, or a whole text file.

    The text is what the file holds, with its line ends and byte-order mark.

    Args:
        path: ``.jsonl``, ``.json`` (one document per line) or ``.parquet``; any other file is text.
            Text and JSON lines may be compressed (``.gz``, ``.zst`` and others).
        text_column: the key or column of the text.
        encoding: of text and JSON lines.

    Yields:
        Whole rows; a text file in passages of about ``PASSAGE`` characters, split at line ends.

    Raises:
        CorpusError: if the file cannot be read, with its name and the line or the columns; caused
            by a ``UnicodeError`` if it may be text in another encoding.
    """
    try:
        yield from _reader(path)(path, text_column, encoding)
    except CorpusError:
        raise
    except UnicodeError as error:
        name = encoding.upper()
        raise CorpusError(f"The corpus file {path} is not text in {name}{_why(error)}.") from error
    except Exception as error:  # each decompressor and parser has its own errors
        raise CorpusError(f"Cannot read the corpus file {path}: {error}") from error


def _why(error: UnicodeError) -> str:
    """What is wrong, without the error's position, which counts from a buffer's start."""
    if not isinstance(error, UnicodeDecodeError):
        return f" ({error})"
    if error.start == 0 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return ", but begins as UTF-16 does"
    return f" (byte {error.object[error.start]:#04x}: {error.reason})"


def read_docstrings(path: Path, *_: str) -> Iterator[Passage]:
    """The docstrings of a Python file as one document, in their order, without indentation.

    A file that this version of Python cannot parse has none.
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backslashes in strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # ValueError: null bytes
            return
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
    yield Passage(text.encode(errors="replace").decode(), True, 1.0)  # no halves of surrogate pairs


def _reader(path: Path) -> Callable[[Path, str, str], Iterator[Passage]]:
    compression = infer_compression(path.name)
    suffix = (path.with_suffix("") if compression else path).suffix
    if suffix == ".parquet" and compression:
        raise CorpusError(f"{path} is Parquet compressed with {compression}: decompress it first.")
    readers = {".json": _read_json_lines, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
    return readers.get(suffix, _read_text)


@contextlib.contextmanager
def _open_text(path: Path, encoding: str) -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """The decompressed file as text, and a function for the share of its bytes read so far."""
    compression, size = infer_compression(path.name), path.stat().st_size
    with path.open("rb") as raw:
        data: BinaryIO = raw
        if compression == "zstd":  # pyarrow reads all frames and detects truncation
            data = pyarrow.CompressedInputStream(raw, "zstd")
        elif compression:
            if compression == "zip" and (files := len(zipfile.ZipFile(raw).namelist())) != 1:
                raise CorpusError(f"{path} is an archive of {files} files, not one: extract it.")
            data = compr[compression](raw, mode="r")
        with io.TextIOWrapper(data, encoding, newline="") as text:  # "": line ends stay as they are
            yield text, lambda: raw.tell() / max(size, 1)


def _read_text(path: Path, _: str, encoding: str) -> Iterator[Passage]:
    with _open_text(path, encoding) as (file, share):
        text = file.read(PASSAGE) + file.readline(PASSAGE)
        while True:
            text.encode()  # some encodings can hold halves of surrogate pairs
            more = file.read(PASSAGE) + file.readline(PASSAGE)
            yield Passage(text, not more, share())
            if not more:
                return
            text = more


def _read_json_lines(path: Path, column: str, encoding: str) -> Iterator[Passage]:
    with _open_text(path, encoding) as (file, share):
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{path}, line {number}: not JSON ({error}).") from error
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                found = f"keys {shown(list(row))}" if isinstance(row, dict) else shown(row)
                raise CorpusError(
                    f"{path}, line {number}: no text under {column!r} (found: {found}); name its "
                    "key with text_column."
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CorpusError(
                    f"{path}, line {number}: the text under {column!r} contains half a "
                    f"surrogate pair ({error})."
                ) from error
            yield Passage(text, True, share())


def _read_parquet(path: Path, column: str, _: str) -> Iterator[Passage]:
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise CorpusError(
                f"{path} has no column {column!r} (found: {shown(names)}); name it with "
                "text_column."
            )
        done = 0
        for batch in file.iter_batches(columns=[column], batch_size=1000):
            done += len(batch)
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise CorpusError(
                        f"{path}: column {column!r} contains {shown(text)}, not text."
                    )
                yield Passage(text, True, done / file.metadata.num_rows)
