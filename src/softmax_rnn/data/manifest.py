"""What a manifest must say, looked at before it names a file to be opened."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from softmax_rnn._utils.rules import HASH, MAPPING, NUMBER, TEXT, Rule, require, whole, wrong
from softmax_rnn.data.corpus import CorpusError

FORMAT = 2  # raise it when the files change
SPLITS = ("train", "test")

_FIELDS = {
    "corpus": TEXT,
    "text_column": TEXT,
    "tokenizer": HASH,
    "tokenizer_name": TEXT,
    "vocab_size": whole(1),
    "end_of_text": whole(),
    "dtype": Rule("'uint16' or 'uint32'", lambda x: x in ("uint16", "uint32")),
    "test_fraction": NUMBER,
    "split_seed": whole(),
    "max_tokens": Rule("a whole number or null", lambda x: x is None or type(x) is int),
    "train": MAPPING,
    "test": MAPPING,
}
_COUNTS = {
    "tokens": whole(1),
    "sha256": HASH,
    "shards": Rule("a list, not empty", lambda x: isinstance(x, list) and len(x) > 0),
}
_SHARD = {
    "name": TEXT,
    "tokens": whole(1),
    "documents": whole(1),
    "sha256": HASH,
    "index_sha256": HASH,
}


def shard_name(split: str, number: int) -> str:
    """What the files of a shard are called, without their endings."""
    return f"{split}-{number:05}"


def sha256(text: str) -> str:
    """The hash of a text, as hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def split_hash(shards: list[dict[str, Any]]) -> str:
    """Of one shard the tokens' own hash; of several the hash of theirs."""
    hashes = [shard["sha256"] for shard in shards]
    return hashes[0] if len(hashes) == 1 else sha256("".join(hashes))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared corpus.

    Raises:
        CorpusError: if it cannot be read, is of another format, or says what cannot be.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest.get("format")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CorpusError(f"{folder} holds no prepared corpus: {error}.") from error
    if found != FORMAT:
        raise CorpusError(
            f"{folder} was prepared in format {found!r}, and this version reads {FORMAT}: "
            "prepare the corpus again."
        )
    try:
        _check(path, manifest)
    except ValueError as error:
        raise CorpusError(
            f"{error} Copy the file from where it is whole, or prepare the corpus again."
        ) from error
    return manifest


def _check(path: Path, manifest: dict[str, Any]) -> None:
    require(path, manifest, _FIELDS)
    if manifest["end_of_text"] >= manifest["vocab_size"]:
        raise wrong(path, "end_of_text", "an id of the vocabulary", manifest["end_of_text"])
    for split in SPLITS:
        counts = manifest[split]
        require(path, counts, _COUNTS, f"{split}.")
        for number, shard in enumerate(counts["shards"]):
            what, name = f"{split}.shards[{number}]", shard_name(split, number)
            require(path, shard, _SHARD, f"{what}.")
            if shard["name"] != name:  # no other path can stand there
                raise wrong(path, f"{what}.name", repr(name), shard["name"])
        for key, expected in (
            ("tokens", sum(shard["tokens"] for shard in counts["shards"])),
            ("sha256", split_hash(counts["shards"])),
        ):
            if counts[key] != expected:
                raise wrong(path, f"{split}.{key}", f"{expected}, by its shards", counts[key])
