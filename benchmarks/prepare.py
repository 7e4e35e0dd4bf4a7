"""Preparing a large corpus: its speed per worker, and its result after being killed and resumed.

    python -m benchmarks.prepare --megabytes 200 --kills 3

The corpus is the source code of Python's standard library, repeated, as JSON lines. The tokenizer
is a byte-level BPE trained on it, unless another is given. In each round the tokenizer alone
tokenises a quarter of the texts in one thread. Then `prepare` tokenises all of them with each
number of workers; its time includes reading, splitting, hashing and writing. Finally a preparation
is killed at random moments and resumed, and its result is compared with an uninterrupted one.

Expected before measuring: at least 0.8 of the tokenizer's own speed per worker.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks import measure
from softmax_rnn.data import load_tokenizer, prepare
from softmax_rnn.data.readers import corpus_files
from softmax_rnn.data.tokenise import BATCH, Encoder
from softmax_rnn.data.tokenizer import END_OF_TEXT

LEAST_SPEED = 0.8  # per worker, relative to the tokenizer alone
SHARD_TOKENS = 2**22
_VOCABULARY, _LEARNED_FROM = 32_000, 20_000_000  # characters


def write_corpus(path: Path, size: int) -> list[str]:
    """Write about ``size`` bytes of JSON lines, and return their texts."""
    sources = [file.read_text(encoding="utf-8", errors="ignore") for file in corpus_files("stdlib")]
    texts: list[str] = []
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            text = f"# {len(texts)}\n{sources[len(texts) % len(sources)]}"
            texts.append(text)
            written += file.write(json.dumps({"text": text}) + "\n")
    return texts


def learn_tokenizer(texts: Sequence[str], path: Path) -> None:
    """Train a byte-level BPE and save it as transformers does."""
    learned = ByteLevelBPETokenizer()
    count = _LEARNED_FROM * len(texts) // max(sum(map(len, texts)), _LEARNED_FROM)
    learned.train_from_iterator(
        texts[:count], _VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, eos_token=END_OF_TEXT)
    fast.save_pretrained(path)


def alone(texts: Sequence[str], encoder: Encoder) -> float:
    """Tokens per second of the tokenizer alone, on a quarter of the texts."""
    tokens, began = 0, time.perf_counter()
    for start in range(0, max(1, len(texts) // 4), BATCH):
        batch = texts[start : start + BATCH]
        encodings = encoder.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        tokens += sum(map(len, encodings))
    return tokens / (time.perf_counter() - began)


def prepared(corpus: str, tokenizer: str, workers: int, cache: Path) -> dict[str, Any]:
    """Start or resume a preparation; returns its manifest."""
    loaded = load_tokenizer(tokenizer)
    options = {"test_fraction": 0.001, "shard_tokens": SHARD_TOKENS, "cache": cache}
    return prepare(corpus, loaded, workers=workers, **options).manifest  # type: ignore[arg-type]


def speed(make: Callable[[Path], dict[str, Any]]) -> float:
    """Tokens per second of a preparation."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        manifest = make(Path(cache))
        spent = time.perf_counter() - began
    return sum(manifest[split]["tokens"] for split in ("train", "test")) / spent


def hashes(manifest: dict[str, Any]) -> list[str]:
    """The hashes of both splits."""
    return [manifest[split]["sha256"] for split in ("train", "test")]


def survives(make: Callable[[Path], dict[str, Any]], kills: int) -> dict[str, Any]:
    """Kill and resume a preparation; its finished segments, and if the result is the same."""
    draw, context = random.Random(0), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root:
        began = time.perf_counter()
        expected = hashes(make(Path(root, "calm")))
        spent = time.perf_counter() - began
        killed, left = Path(root, "killed"), []
        for _ in range(kills):
            process = context.Process(target=make, args=(killed,))
            process.start()
            process.join(draw.uniform(0.3, 0.6) * spent)  # it has finished some segments by then
            process.kill()
            process.join()
            left.append(len(list(killed.glob(".*/stretch-*.json"))))
        found = hashes(make(killed))
    return {"stretches_left": left, "same": found == expected}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of the tokenizer alone and of each number of workers, then the kills."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # alone means one thread
    opening = measure.opening("prepare", arguments)
    with tempfile.TemporaryDirectory() as root:
        corpus = Path(root, "corpus.jsonl")
        texts = write_corpus(corpus, int(arguments.megabytes * 1e6))
        tokenizer = arguments.tokenizer or str(Path(root, "bpe"))
        if not arguments.tokenizer:
            learn_tokenizer(texts, Path(tokenizer))
        encoder = Encoder(load_tokenizer(tokenizer))
        make = partial(prepared, str(corpus), tokenizer)
        own: list[float] = []
        speeds: dict[int, list[float]] = {count: [] for count in arguments.workers}
        for _ in track(range(arguments.rounds), "Preparing"):
            own.append(alone(texts, encoder))
            for count, found in speeds.items():
                found.append(speed(partial(make, count)))
        kills = survives(partial(make, max(arguments.workers)), arguments.kills)
    return {
        **opening,
        "megabytes": arguments.megabytes,
        "tokenizer": arguments.tokenizer or f"byte-level BPE, {_VOCABULARY} tokens",
        "alone_tokens_per_second": measure.summary(own),
        "alone_rounds": own,
        "speeds": [
            {
                "workers": count,
                "rounds": found,
                "tokens_per_second": measure.summary(found),
                "of_alone_a_worker": measure.ratios(found, [count * each for each in own]),
            }
            for count, found in speeds.items()
        ],
        "kills": kills,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """One row for each number of workers."""
    table = measure.table("workers", "million tokens/s", "of the tokenizer alone, a worker")
    table.add_row("alone", measure.spread(result["alone_tokens_per_second"], 1e-6), "1")
    for row in result["speeds"]:
        own = measure.spread(row["of_alone_a_worker"])
        table.add_row(str(row["workers"]), measure.spread(row["tokens_per_second"], 1e-6), own)
    console.print(table)
    console.print(f"Finished segments left by each kill: {result['kills']['stretches_left']}")


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether each number of workers is fast enough, and the hashes are the same."""
    slowest = min(row["of_alone_a_worker"]["median"] for row in result["speeds"])
    same = result["kills"]["same"]
    return [
        {
            "what": "speed per worker, relative to the tokenizer alone",
            "limit": f">= {LEAST_SPEED}",
            "found": slowest,
            "holds": slowest >= LEAST_SPEED,
        },
        {"what": "killed = undisturbed", "limit": "hashes", "found": None, "holds": same},
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=3)
    options.add_argument("--megabytes", type=float, default=200.0)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="to compare")
    options.add_argument("--tokenizer", help="bytes, or a Hugging Face tokenizer's name or path")
    options.add_argument("--kills", type=int, default=3)
    return measure.carry_out(measure.parsed(options, argv), run, show, judge)


if __name__ == "__main__":
    raise SystemExit(main())
