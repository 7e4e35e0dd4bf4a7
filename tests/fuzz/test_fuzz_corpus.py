"""Corpus files of every kind, damaged: their text as a simple reader finds it, or a clear error."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import event, example, given
from hypothesis import strategies as st

import softmax_rnn.data.preparation as preparation
import softmax_rnn.data.readers as readers
import softmax_rnn.data.tokenise as tokenise
from fuzzing import damaged, odd_values, outcome, snapshot
from softmax_rnn.data import prepare as prepare_corpus
from softmax_rnn.data.readers import documents, read_passages
from softmax_rnn.data.tokenizer import byte_tokenizer
from softmax_rnn.training import RunConfig
from softmax_rnn.training.run import load_corpus

TOKENIZER = byte_tokenizer()
PACKERS = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
# Formats that cannot be cut short without it being noticed.
SEALED = (".gz", ".bz2", ".xz", ".zst")

# All that some reader takes for the end of a line, or of a file; half of them in some texts.
_breaks = st.sampled_from([*"\n\r\v\f\x1a\x1c\x1d\x1e\x85\u2028\u2029\ufeff\0", "\r\n", "\n\r"])
_characters = st.characters(exclude_categories=["Cs"])
_documents = st.lists(
    st.text(_characters, max_size=30)
    | st.lists(_breaks | st.sampled_from("aé "), max_size=30).map("".join)
    | st.just("x" * 300_000),
    max_size=5,
)


def _zip(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


def _parquet(texts: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"n": list(range(len(texts))), "text": texts}), file)
    return file.getvalue()


def _expected(name: str, data: bytes) -> list[str] | None:
    """The documents of a plain file; ``None`` if it has none that can be read."""
    try:
        text = data.decode()
        if name.endswith(".txt"):
            return [text]
        rows = [json.loads(line) for line in re.split("\r\n|\r|\n", text) if line.strip()]
        found = [row["text"] for row in rows]
        assert all(isinstance(document, str) for document in found)
        "".join(found).encode()
        return found
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        return None


def _texts(name: str, packed: bytes) -> list[str]:
    """The documents of a file that is whole; of JSON lines, those under ``text``."""
    unpack = {".gz": gzip.decompress, ".zst": zstandard.ZstdDecompressor().decompress}
    end = Path(name).suffix
    expected = _expected(name, unpack[end](packed) if end in unpack else packed)
    assert expected is not None
    return expected


@st.composite
def _rows(draw: st.DrawFn, documents: list[str]) -> bytes:
    """JSON lines, some of them not what they should be."""
    lines = [json.dumps({"text": text}, ensure_ascii=draw(st.booleans())) for text in documents]
    if draw(st.integers(0, 5)) == 0:
        bad = st.sampled_from(
            [
                *('{"text": 5}', '{"txt": "a"}', '["text"]', "null", '{"text": "a"', "{}", "NaN"),
                *('{"text": null}', '"text"', "9" * 5000, "[" * 100_000, '{"text": "\\ud800"}'),
                json.dumps({f"k{i}" * 50: i for i in range(2000)}),
                json.dumps({"a\nb": 1}),
            ]
        )
        line = draw(bad | odd_values.map(json.dumps))
        lines.insert(draw(st.integers(0, len(lines))), line)
    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"]))
    return end.join(lines).encode("utf-8", "surrogatepass")


@st.composite
def _files(draw: st.DrawFn) -> tuple[str, bytes, list[str] | None, bool]:
    """A name, what the file holds, its documents if they are known, and whether it must fail."""
    documents = draw(_documents)
    kind = draw(st.sampled_from(["txt", "jsonl", "jsonl", "parquet", "zip"]))
    if kind == "zip":
        members = draw(st.integers(0, 3))
        files = {f"{i}.jsonl": draw(_rows(documents)) for i in range(members)}
        data = _zip(files)
        expected = _expected("", files["0.jsonl"]) if members == 1 else None
        return "a.jsonl.zip", data, expected, expected is None
    if kind == "parquet":
        data = _parquet(documents)
        changed = draw(st.just(data) | damaged(data))
        return "a.parquet", changed, documents if changed == data else None, len(changed) < 12
    end = draw(st.sampled_from(list(PACKERS)))
    plain = "".join(documents).encode() if kind == "txt" else draw(_rows(documents))
    if draw(st.booleans()):
        plain = draw(damaged(plain))
    data = PACKERS[end](plain)
    changed = draw(st.just(data) | damaged(data)) if end else data
    cut = 0 < len(changed) < len(data) and data.startswith(changed)
    expected = _expected(f"a.{kind}", plain) if changed == data else None
    return f"a.{kind}{end}", changed, expected, cut or (changed == data and expected is None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@given(_files())
def test_files(folder: Path, made: tuple[str, bytes, list[str] | None, bool]) -> None:
    name, data, expected, fails = made
    path = folder / name
    path.write_bytes(data)
    event(name)
    found = outcome(lambda: list(documents(read_passages(path, "text"))), names=str(path))
    path.unlink()
    assert found.error is not None or not fails
    if found.error is None:
        assert all(isinstance(text, str) for text in found.value)
        assert expected is None or found.value == expected
    else:
        assert expected is None


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "\0", "[/b]", "**/[", "nowhere", "a\nb", "\udcff", "hf:", "hf:@", "hf:[/b]/x@y"),
        *("x" * 5000, "~", "manifest.json/x", "/dev/null", "/dev/zero/x"),
    ],
)
def test_names_of_corpora(name: str) -> None:
    found = outcome(lambda: load_corpus(RunConfig.from_dict({"corpus": name})))
    assert found.error is not None


@st.composite
def _corpora(draw: st.DrawFn) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files of a corpus and the options of its preparation."""
    files: dict[str, bytes] = {}
    for index in range(draw(st.sampled_from([0, 1, 2, 3, 3]))):
        documents = draw(_documents)
        end = draw(st.sampled_from([".jsonl", ".txt", ".jsonl.gz", ".jsonl.zst"]))
        rows = "".join(documents).encode() if end == ".txt" else draw(_rows(documents))
        packed = PACKERS[Path(f"a{end}").suffix if end.count(".") > 1 else ""](rows)
        files[f"{index}{end}"] = draw(damaged(packed)) if draw(st.integers(0, 4)) == 0 else packed
    options = {
        "test_fraction": st.sampled_from([0.5, 1e-9, 1 - 1e-9, 0.0, 1.0, -1.0]) | st.floats(),
        "split_seed": st.integers() | st.integers(0, 2**32 - 1),
        "max_tokens": st.none() | st.integers() | st.integers(1, 200),
        "shard_tokens": st.integers(1, 200) | st.integers(),
        "text_column": st.sampled_from(["text", "", "txt", "\0"]),
        "bad_files": st.sampled_from(["skip", "skip", "no"]),
    }
    given_ = {key: draw(value) for key, value in options.items() if draw(st.integers(0, 6)) == 0}
    return files, given_


@given(_corpora(), st.booleans())
@example(({"a.txt": b"some text\n" * 9}, {"max_tokens": 10**30}), False)
@example(({"a.txt": b"some text\n" * 9}, {"split_seed": -1}), False)
@example(({"a.txt": b"a"}, {"max_tokens": 1}), False)
@example(({"a.txt": b"a" * 30}, {"max_tokens": 1}), True)
def test_corpora(folder: Path, made: tuple[dict[str, bytes], dict[str, Any]], large: bool) -> None:
    files, options = made
    shutil.rmtree(folder / "texts", ignore_errors=True)
    (folder / "texts").mkdir()
    for name, data in files.items():
        (folder / "texts" / name).write_bytes(data)
    before, cache = snapshot(folder / "texts"), folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        if large:  # as a corpus of gigabytes is prepared
            short = sum(map(len, files.values())) < 5000  # so that some end between a \r and its \n
            patch.setattr(readers, "PASSAGE", 3 if short else 3000)
            patch.setattr(tokenise, "_CHARACTERS", 50)
            patch.setattr(preparation, "_SMALL", 20)
        found = outcome(
            lambda: prepare_corpus(
                str(folder / "texts"), TOKENIZER, cache=cache, workers=1, **options
            )
        )
    assert snapshot(folder / "texts") == before
    left = {path.name for path in cache.iterdir()} if cache.exists() else set()
    if found.error is not None:
        # What is finished of a large corpus is kept, to go on from.
        kept = large and list(cache.glob(".*.parts/stretch-*.json"))
        assert all(name.endswith((".lock", ".parts") if kept else ".lock") for name in left), left
        assert not list(cache.glob(".*.parts/.*"))
        return
    corpus = found.value
    assert left == {corpus.folder.name}
    assert not list(cache.rglob(".*"))
    corpus.verify()
    left_out = corpus.manifest["source"]["skipped"]
    assert not left_out or options["bad_files"] == "skip"
    written = [
        text
        for name in sorted(files)
        if files[name] and str(folder / "texts" / name) not in left_out
        for text in _texts(name, files[name])
        if text
    ]
    tokens = [i for split in ("train", "test") for i in corpus.tokens(split)[:].tolist()]
    expected = [i for text in written for i in (*text.encode(), 256)]
    if options.get("max_tokens") is None:
        assert sorted(tokens) == sorted(expected)
    else:
        assert len(tokens) <= len(expected)
