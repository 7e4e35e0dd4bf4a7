"""The manifest of a prepared corpus, validated before any file that it names is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from softmax_rnn._utils.errors import shown
from softmax_rnn._utils.integrity import MANIFEST, sha256
from softmax_rnn._utils.validation import Count, Hash, Number, PositiveInt, Text, validated
from softmax_rnn.data.readers import CorpusError

FORMAT = 3  # increase it when the files change, or how text is read
SPLITS = ("train", "test")


class _Shard(TypedDict):
    name: Text
    tokens: PositiveInt
    documents: PositiveInt
    sha256: Hash
    index_sha256: Hash


class _Split(TypedDict):
    tokens: PositiveInt
    sha256: Hash
    shards: Annotated[list[_Shard], Field(min_length=1)]


class _Manifest(TypedDict):
    corpus: Text
    text_column: Text
    encoding: Text
    bad_files: Text
    tokenizer: Hash
    tokenizer_name: Text
    vocab_size: PositiveInt
    end_of_text: Count
    dtype: Literal["uint16", "uint32"]
    test_fraction: Number
    split_seed: Count
    max_tokens: PositiveInt | None
    train: _Split
    test: _Split


def shard_name(split: str, number: int) -> str:
    """The name of a shard's files, without their suffixes."""
    return f"{split}-{number:05}"


def split_hash(shards: list[dict[str, Any]]) -> str:
    """The hash of the tokens if there is one shard, else the hash of the shards' hashes."""
    hashes = [shard["sha256"] for shard in shards]
    return hashes[0] if len(hashes) == 1 else sha256("".join(hashes))


def is_prepared(corpus: str) -> bool:
    """Whether ``corpus`` is the folder of a prepared corpus."""
    manifest = Path(corpus) / MANIFEST
    if not corpus or not manifest.is_file():
        return False
    if manifest.with_name(shard_name("train", 0) + ".idx").is_file():
        return True  # even if the manifest is damaged
    try:
        return "end_of_text" in json.loads(manifest.read_text(encoding="utf-8"))
    except (ValueError, TypeError, RecursionError):
        return False  # an unrelated file of this name, among texts


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared corpus; ``CorpusError`` if it is invalid or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest.get("format")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CorpusError(f"{folder} holds no prepared corpus: {error}.") from error
    if found != FORMAT:
        raise CorpusError(
            f"{folder} was prepared in format {shown(found)}, and this version reads {FORMAT}: "
            "prepare the corpus again."
        )
    try:
        validated(_Manifest, manifest, path)
        _check_consistency(path, manifest)
    except ValueError as error:
        raise CorpusError(f"{error} Restore this file, or prepare the corpus again.") from error
    return manifest


def _check_consistency(path: Path, manifest: dict[str, Any]) -> None:
    """Check the fields that follow from others."""

    def check(field: str, found: Any, expected: Any) -> None:
        if found != expected:
            raise ValueError(f"{path}: {field} must be {expected!r}, not {shown(found)}.")

    if manifest["end_of_text"] >= manifest["vocab_size"]:
        found = manifest["end_of_text"]
        raise ValueError(f"{path}: end_of_text must be an id of the vocabulary, not {found}.")
    for split in SPLITS:
        counts, shards = manifest[split], manifest[split]["shards"]
        for number, shard in enumerate(shards):  # so that no name refers to another folder
            check(f"{split}.shards[{number}].name", shard["name"], shard_name(split, number))
        check(f"{split}.tokens", counts["tokens"], sum(shard["tokens"] for shard in shards))
        check(f"{split}.sha256", counts["sha256"], split_hash(shards))
