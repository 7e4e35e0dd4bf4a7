"""Datasets of the Hugging Face Hub, streamed: local ones in the same format stand for them.

And a corpus that is a part of its files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetNotFoundError

from softmax_rnn.data import CorpusError, PreparedCorpus, Progress, prepare
from softmax_rnn.data.source import LocalSource
from softmax_rnn.data.tokenizer import byte_tokenizer

load_dataset = datasets.load_dataset
TEXTS = [f"document {i} " + "query value " * (i % 17) for i in range(700)]
Hub = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Makes ``load_dataset`` give local Parquet or JSON lines; returns what it is asked for."""

    def make(splits: dict[str, list[str | None]], kind: str = "parquet", files: int = 3) -> Any:
        data_files: dict[str, list[str]] = {}
        for split, texts in splits.items():
            for number, part in enumerate(np.array_split(np.array(texts, dtype=object), files)):
                path = tmp_path / f"{split}-{number}.{kind}"
                data_files.setdefault(split, []).append(str(path))
                if kind == "parquet":
                    table = pa.table({"id": range(len(part)), "text": pa.array(part, pa.string())})
                    pq.write_table(table, path, row_group_size=50)
                else:
                    lines = [json.dumps({"text": text}) for text in part]
                    path.write_text("\n".join(lines))
        asked: list[tuple[Any, ...]] = []

        def load(name: str, config: str | None, *, revision: Any, streaming: bool) -> Any:
            asked.append((name, config, revision))
            builder = {"parquet": "parquet", "jsonl": "json"}[kind]
            return load_dataset(builder, data_files=data_files, streaming=streaming)

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return make


def documents(corpus: PreparedCorpus, split: str) -> list[str]:
    stream = corpus.tokens(split)[:]
    pieces = np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]
    return [bytes(piece[:-1].tolist()).decode() for piece in pieces]


def test_the_corpus_of_docstrings_is_without_code() -> None:
    source = LocalSource("docstrings", "text")
    future = next(passage for passage in source.read("train", None) if passage.text)
    assert source.files[0].name == "__future__.py"
    assert future.text.startswith("Record of phased-in incompatible language changes.")
    assert "all_feature_names = [" not in future.text
    assert "all_feature_names = [" in next(LocalSource("stdlib", "text").read("train", None)).text


@pytest.mark.parametrize("own", ["test", "validation"])
def test_its_own_test_split_is_used(hub: Hub, tmp_path: Path, own: str) -> None:
    asked = hub({"train": TEXTS[:600], own: TEXTS[600:], "extra": TEXTS[:5]})
    corpus = prepare("hf:owner/name@config", byte_tokenizer(), cache=tmp_path / "cache")
    assert documents(corpus, "train") == TEXTS[:600]
    assert documents(corpus, "test") == TEXTS[600:]
    assert asked == [("owner/name", "config", None)]
    assert corpus.manifest["source"]["splits"] == {"train": "train", "test": own}
    # Found again without asking the Hub.
    again = prepare("hf:owner/name@config", byte_tokenizer(), cache=tmp_path / "cache")
    assert (again.folder, len(asked)) == (corpus.folder, 1)


@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_else_some_documents_are_held_out(hub: Hub, tmp_path: Path, kind: str) -> None:
    texts: list[Any] = list(TEXTS)
    texts[3], texts[400] = "", None  # rows without text are left out
    asked = hub({"all": texts}, kind)
    options: dict[str, Any] = {"test_fraction": 0.01, "cache": tmp_path / "cache", "workers": 1}
    corpus = prepare("hf:owner/name", byte_tokenizer(), **options)
    train, test = documents(corpus, "train"), documents(corpus, "test")
    assert len(test) == 7
    assert sorted(train + test) == sorted(text for text in texts if text)
    assert train == [text for text in texts if text and text not in test]
    assert asked == [("owner/name", None, None)]


@pytest.mark.usefixtures("scale")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("stop_at", [5, 40, 110])
@pytest.mark.parametrize("version", [None, "0.0"])
def test_an_interrupted_stream_resumes(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: bool,
    stop_at: int,
    version: str | None,
) -> None:
    """Also by another version of datasets, which cannot read the bookmarks."""
    texts: list[Any] = [*TEXTS[:640], *[""] * 20, *TEXTS[640:]]
    hub({"train": texts, **({"test": TEXTS[:40]} if own else {})})
    options: dict[str, Any] = {"test_fraction": 0.1, "workers": 1, "shard_tokens": 4000}
    name = "hf:owner/name"
    expected = prepare(name, byte_tokenizer(), cache=tmp_path / "a", **options)
    seen = 0

    def stop(progress: Progress) -> None:
        nonlocal seen
        seen += 1
        if seen == stop_at:
            raise KeyboardInterrupt

    options["cache"] = tmp_path / "b"
    with pytest.raises(KeyboardInterrupt):
        prepare(name, byte_tokenizer(), progress=stop, **options)
    if version:
        monkeypatch.setattr(datasets, "__version__", version)
        monkeypatch.setattr(datasets.IterableDataset, "load_state_dict", None)
    records = list((tmp_path / "b").glob(".*/stretch-*.json"))
    assert len(records) >= (stop_at > 11)
    found = prepare(name, byte_tokenizer(), **options)
    for path in expected.folder.iterdir():
        assert (found.folder / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.usefixtures("scale")
def test_the_commit_is_kept_from_the_first_session_on(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub({"train": TEXTS})
    heads = iter(["first", "second"])

    class Api:
        def dataset_info(self, name: str, timeout: float) -> Any:
            return type("Info", (), {"sha": next(heads)})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    options: dict[str, Any] = {"cache": tmp_path, "workers": 1, "shard_tokens": 4000}

    def stop(progress: Progress) -> None:
        if progress.tokens > 20_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("hf:owner/name", byte_tokenizer(), progress=stop, **options)
    corpus = prepare("hf:owner/name", byte_tokenizer(), **options)
    assert [revision for _, _, revision in asked] == ["first", "first"]
    assert corpus.manifest["source"]["revision"] == "first"


def test_max_tokens_of_both_splits(hub: Hub, tmp_path: Path) -> None:
    hub({"train": TEXTS, "test": TEXTS})
    options: dict[str, Any] = {"max_tokens": 9000, "test_fraction": 0.1, "cache": tmp_path}
    corpus = prepare("hf:owner/name", byte_tokenizer(), **options)
    ends = np.cumsum([len(text) + 1 for text in TEXTS])
    assert documents(corpus, "train") == TEXTS[: int(np.searchsorted(ends, 9000)) + 1]
    assert documents(corpus, "test") == TEXTS[: int(np.searchsorted(ends, 900)) + 1]


def test_progress_of_a_stream_without_end(hub: Hub, tmp_path: Path) -> None:
    hub({"train": TEXTS, "test": TEXTS[:10]})
    seen: list[Progress] = []
    prepare("hf:owner/name", byte_tokenizer(), cache=tmp_path, progress=seen.append)
    assert {progress.share for progress in seen} == {None}
    assert [progress.tokens for progress in seen] == sorted(progress.tokens for progress in seen)
    assert min(progress.tokens_per_second for progress in seen) > 0
    prepare(
        "hf:owner/name", byte_tokenizer(), cache=tmp_path, progress=seen.append, max_tokens=9000
    )
    assert seen[-1].share == 1.0


def test_mistakes_are_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(message: str, name: str = "hf:owner/name", **options: Any) -> None:
        with pytest.raises(CorpusError, match=message):
            prepare(name, byte_tokenizer(), cache=tmp_path / "cache", **options)
        assert not list((tmp_path / "cache").glob("*corpus-*parts"))

    hub({"train": TEXTS})
    attempt("no column 'body' .found: id, text.; name it with text_column", text_column="body")
    attempt("column 'id' contains int, not text", text_column="id")
    attempt("'hf:' names no dataset: give 'hf:owner/name", name="hf:")
    hub({"a": TEXTS, "b": TEXTS})
    attempt("no split 'train' .found: a, b")
    hub({"train": ["", ""]}, files=1)
    attempt("holds no text")

    def load(name: str, config: str | None, **_: Any) -> Any:
        if name == "owner/nmae":
            raise DatasetNotFoundError("Dataset 'owner/nmae' doesn't exist on the Hub")
        if config != "CC-MAIN-2024-51":
            raise ValueError(f"BuilderConfig {config!r} not found. Available: ['CC-MAIN-2024-51']")
        raise ConnectionError("Couldn't reach the Hub")

    class Api:
        def dataset_info(self, name: str, timeout: float) -> Any:
            raise ConnectionError

        def list_datasets(self, author: str, limit: int) -> Any:
            assert author == "owner"
            return [type("Info", (), {"id": name}) for name in ("owner/name", "owner/other")]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    attempt("doesn't exist on the Hub Did you mean 'owner/name'. Found", name="hf:owner/nmae")
    attempt("not found. Available: .'CC-MAIN-2024-51'", name="hf:owner/name@CC-MAIN-2024-50")
    attempt("Cannot load .*Couldn't reach the Hub", name="hf:owner/name@CC-MAIN-2024-51")
