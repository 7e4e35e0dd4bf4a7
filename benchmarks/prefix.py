"""A long document read once and asked ten questions, and what it costs to take tokens back.

    python -m benchmarks.prefix                    # CPU: 100,000 tokens in pieces of 1,000
    python -m benchmarks.prefix --tokens 10000 --variants softmax taylor:2

Small models with the same (random) weights read a document in pieces. Then ten questions follow
it, one after the other and as one batch; each is answered by some tokens. A state is restored
before each question, and a key/value cache is cropped after each. Before anything is timed, the
answers after a short document must be those without a cache, one after the other and as a batch.

Undo is timed after the document: steps of one token, with and without recording, and drafts of
five tokens of which two stay, against the same drafts that stay whole.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import measure
from softmax_rnn.models import SoftmaxRNNConfig, SoftmaxRNNForCausalLM, initialize
from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.models.cache_sizes import cache_bytes

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2**20,
}
VARIANTS = ("softmax", "taylor:2", "lolcats:64")
QUESTIONS, WORDS, ANSWER = 10, 20, 10  # questions, their tokens, those of an answer
CHECKED = (90, 40)  # tokens of the short document, and of its pieces
DRAFTS, DRAFT, KEPT = 8, 5, 2
UNDO_LIMIT = 1.1  # of a step with recording, relative to one without


def model_of(variant: str, device: str) -> Any:
    """A small model, whose weights are those of every other variant."""
    model = SoftmaxRNNForCausalLM(SoftmaxRNNConfig(attention=variant, **SIZES))
    initialize(model, seed=0)
    return model.to(device).eval()


def tokens(rows: int, length: int, seed: int, device: str) -> Tensor:
    """Drawn uniformly from the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (rows, length), generator=draw).to(device)


def read(model: Any, document: Tensor, piece: int) -> Any:
    """The cache after a document, read in pieces."""
    cache = model.new_cache()
    for part in document.split(piece, 1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def answered(model: Any, cache: Any, questions: Tensor) -> Tensor:
    """The likeliest tokens after questions [B, T] that follow what the cache has read."""
    ids, found = questions, []
    for _ in range(ANSWER):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = out[:, -1:].argmax(-1)
        found.append(ids)
    return torch.cat(found, 1)


class Asked:
    """Ten questions after one prefix: a call answers them all, [10, ANSWER]."""

    def __init__(self, model: Any, prefix: Any, questions: Tensor, together: bool) -> None:
        self.model, self.prefix, self.together = model, prefix, together
        self.questions, self.nbytes = questions, 0

    def __call__(self) -> Tensor:
        """The answers."""
        if self.together:
            states = isinstance(self.prefix, RecurrentCache)
            cache = self.prefix.snapshot() if states else copy.deepcopy(self.prefix)
            cache.batch_repeat_interleave(len(self.questions))
            self.nbytes = cache_bytes(cache)
            return answered(self.model, cache, self.questions)
        found, cache = [], self.prefix
        for question in self.questions.split(1):
            if isinstance(self.prefix, RecurrentCache):
                cache = self.prefix.snapshot()
            found.append(answered(self.model, cache, question))
            if cache is self.prefix:
                cache.crop(1 - WORDS - ANSWER)  # the last token of an answer was not read
        return torch.cat(found)


def check(models: dict[str, Any], device: str) -> None:
    """Exit if a shared prefix changes an answer."""
    document, questions = tokens(1, CHECKED[0], 1, device), tokens(QUESTIONS, WORDS, 2, device)
    for name, model in models.items():
        prefix = read(model, document, CHECKED[1])
        ids = torch.cat((document.expand(QUESTIONS, -1), questions), 1)
        for _ in range(ANSWER):
            new = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, new), 1)
        for together in (False, True):
            if not torch.equal(Asked(model, prefix, questions, together)(), ids[:, -ANSWER:]):
                raise SystemExit(f"Not timed: {name} answers otherwise after a shared prefix.")


def asked(
    model: Any, document: Tensor, questions: Tensor, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Any]:
    """The costs of one variant, and its cache after the document."""
    device = arguments.device
    measure.synchronize(device)
    started = time.perf_counter()
    prefix = read(model, document, arguments.piece)
    measure.synchronize(device)
    reading = time.perf_counter() - started
    each = {
        "one by one": Asked(model, prefix, questions, False),
        "as a batch": Asked(model, prefix, questions, True),
    }
    options = {"device": device, "patience": arguments.patience}
    times = measure.seconds(each, arguments.rounds, **options)
    found = {
        "cache": "states" if isinstance(prefix, RecurrentCache) else "keys and values",
        "cache_bytes": cache_bytes(prefix),
        "read_seconds": reading,
        "answer_seconds": {name: measure.summary(times[name]) for name in each},
        "batch_bytes": each["as a batch"].nbytes,
    }
    if isinstance(prefix, RecurrentCache):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prefix.safetensors"
            work: dict[str, measure.Work] = {
                "snapshot": prefix.snapshot,
                "save": lambda: prefix.save(path),
                "load": lambda: RecurrentCache.load(path, device),
            }
            work["save"]()
            costs = measure.seconds(work, arguments.rounds, **options, shuffled=False)
            found["prefix_seconds"] = {name: measure.summary(costs[name]) for name in work}
    return found, prefix


class Drafted:
    """Some calls after a prefix, of ``new`` tokens each; a state is at the prefix before each run.

    ``kept`` of them stay; ``None``: nothing is recorded, and all stay.
    """

    def __init__(self, model: Any, prefix: Any, calls: int, new: int, kept: int | None) -> None:
        self.model, self.prefix, self.calls, self.kept = model, prefix, calls, kept
        self.ids = tokens(1, new, 3, str(model.device))

    def __call__(self) -> None:
        """All calls, after the prefix alone."""
        cache = self.prefix.snapshot()
        if self.kept is not None:
            cache.activate_past_recording()
        for _ in range(self.calls):
            self.model(self.ids, past_key_values=cache, use_cache=True)
            if self.kept is not None:
                cache.crop(self.kept - self.ids.shape[1])


def undone(model: Any, prefix: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps and drafts, and their ratios."""
    steps = DRAFTS * DRAFT
    work = {
        "step": Drafted(model, prefix, steps, 1, None),
        "step, recorded": Drafted(model, prefix, steps, 1, 1),
        "draft": Drafted(model, prefix, DRAFTS, DRAFT, None),
        "draft, taken back": Drafted(model, prefix, DRAFTS, DRAFT, KEPT),
    }
    options = {"device": arguments.device, "patience": arguments.patience}
    times = measure.seconds(work, 7 * arguments.rounds, **options)
    calls = {name: item.calls for name, item in work.items()}
    return {
        "call_seconds": {
            name: measure.summary([value / calls[name] for value in values])
            for name, values in times.items()
        },
        "recorded": measure.ratios(times["step, recorded"], times["step"]),
        "taken_back": measure.ratios(times["draft, taken back"], times["draft"]),
    }


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check, then measure; everything as plain data."""
    device = arguments.device
    result = measure.opening("prefix", arguments)
    models = {name: model_of(name, device) for name in arguments.variants}
    check(models, device)
    document = tokens(1, arguments.tokens, 1, device)
    questions = tokens(QUESTIONS, WORDS, 2, device)
    prefixes, undo = [], []
    for name, model in models.items():
        found, prefix = asked(model, document, questions, arguments)
        prefixes.append({"name": name, **found})
        if isinstance(prefix, RecurrentCache):
            undo.append({"name": name, **undone(model, prefix, arguments)})
        del prefix
    sizes = {"questions": QUESTIONS, "question_tokens": WORDS, "answer_tokens": ANSWER}
    drafts = {"draft_tokens": DRAFT, "kept_tokens": KEPT}
    given = {"tokens": arguments.tokens, "piece": arguments.piece, "sizes": SIZES}
    return {**result, **given, **sizes, **drafts, "prefixes": prefixes, "undo": undo}


def show(result: dict[str, Any], console: Console) -> None:
    """Both tables."""
    table = measure.table("name", "cache KiB", "read s", "one by one s", "batch s", "batch KiB")
    for row in result["prefixes"]:
        answers = row["answer_seconds"]
        table.add_row(
            row["name"],
            f"{row['cache_bytes'] / 1024:,.0f}",
            f"{row['read_seconds']:.1f}",
            *(f"{answers[how]['median']:.3f}" for how in ("one by one", "as a batch")),
            f"{row['batch_bytes'] / 1024:,.0f}",
        )
    console.print(table)
    table = measure.table("name", "step ms", "recorded / not", "draft ms", "taken back / not")
    for row in result["undo"]:
        calls = row["call_seconds"]
        table.add_row(
            row["name"],
            f"{1e3 * calls['step']['median']:.2f}",
            measure.spread(row["recorded"]),
            f"{1e3 * calls['draft']['median']:.2f}",
            measure.spread(row["taken_back"]),
        )
    console.print(table)


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether recording costs next to nothing."""
    worst = max((row["recorded"]["median"] for row in result["undo"]), default=None)
    return [
        {
            "what": "a recorded step relative to one that is not",
            "found": worst,
            "limit": f"<= {UNDO_LIMIT}",
            "holds": None if worst is None else worst <= UNDO_LIMIT,
        }
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=3, patience=30.0)
    options.add_argument("--tokens", type=int, default=100_000, help="of the document")
    options.add_argument("--piece", type=int, default=1000, help="tokens read at once")
    options.add_argument("--variants", nargs="+", default=VARIANTS, help="names of attentions")
    return measure.carry_out(measure.parsed(options, argv), run, show, judge)


if __name__ == "__main__":
    raise SystemExit(main())
