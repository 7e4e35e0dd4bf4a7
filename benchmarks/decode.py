"""Decoding token by token: key/value caches, states, and Hugging Face's Llama.

    python -m benchmarks.decode                  # CPU: the demo preset, float32
    python -m benchmarks.decode --device cuda    # the small preset (275 M), bfloat16
    python -m benchmarks.decode --preset smollm2 --only llama converted --lengths 16 512 2048 8192

All models have the same (random) weights. Before anything is timed, each model must choose the
same greedy tokens with its cache as without, and softmax the same tokens as Llama. Then a prompt is
read, and every round decodes some tokens after it. The likeliest token of a forward pass is the
next input; the rest of `generate()` is not used. Ratios are relative to Llama with SDPA. "Compiled"
are steps by `torch.compile` with a cache of fixed addresses; Llama's has room for these tokens.
"Converted" is Llama with a window and a state in place of its attention.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache

import softmax_rnn as sr
from benchmarks import measure
from benchmarks.llama import PRESET, VOCABULARY, models, run_config, tokens
from benchmarks.targets import judge
from softmax_rnn.models.cache import RecurrentCache

VARIANTS = ["softmax", "taylor:2", "linear_elu"]
CONVERTED = "window_state:16"
COMPILED = ("llama", "softmax", "taylor:2")  # these also compiled, for a batch of 1
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = {1: 2**20, 16: 2048}  # with the longest prompt
_SUFFIX, BACKEND = " compiled", "inductor"
CHECKED = (96, 24)  # numbers of prompt tokens and decoded tokens in the check


def new_cache(model: Any, room: int | None) -> Cache:
    """A recurrent cache for a finite series, else a key/value cache.

    ``room`` is the number of tokens of a cache of fixed addresses, for compiled steps.
    """
    if hasattr(model, "new_cache") and hasattr(model.config, "converted_layers"):
        return model.new_cache()
    spec = getattr(model.config, "spec", None)
    if spec is not None and spec.has_state:
        return RecurrentCache(static=room is not None)
    if room is not None:
        return StaticCache(config=model.config, max_cache_len=room)
    return DynamicCache(config=model.config)


def cache_bytes(cache: Any) -> int:
    """The size of a cache."""
    if isinstance(cache, RecurrentCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class Decoder:
    """A model that has read a prompt; a call decodes some tokens after it.

    Afterwards a key/value cache is set back to the prompt, so that every call starts at the same
    length. A state is not, since its size and cost are constant.
    """

    def __init__(self, model: Any, prompt: Tensor, new_tokens: int, compiled: bool = False) -> None:
        self.new_tokens, self.prompted = new_tokens, prompt.shape[1]
        self.cache = new_cache(model, self.prompted + new_tokens if compiled else None)
        self.first = self._next(model, prompt)
        self.step = torch.compile(model, backend=BACKEND, fullgraph=True) if compiled else model
        self.nbytes = cache_bytes(self.cache)

    def _next(self, model: Any, ids: Tensor) -> Tensor:
        out = model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        # The same strides for a prompt and a token, or steps would be compiled twice.
        return out.logits[:, -1:].argmax(-1).clone(memory_format=torch.contiguous_format)

    def __call__(self) -> Tensor:
        """The tokens after the prompt, [batch, 1 + new_tokens]."""
        ids = [self.first]
        for _ in range(self.new_tokens):
            ids.append(self._next(self.step, ids[-1]))
        if isinstance(self.cache, StaticCache):
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.prompted)
        elif not isinstance(self.cache, RecurrentCache):
            self.cache.crop(-self.new_tokens)
        return torch.cat(ids, dim=1)


def uncached(model: Any, ids: Tensor, new_tokens: int) -> Tensor:
    """The same tokens, computed without a cache."""
    prompted = ids.shape[1]
    for _ in range(new_tokens + 1):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[:, prompted:]


def contestants(made: dict[str, Any], batch: int) -> list[tuple[str, str, bool]]:
    """Of each contestant: its name, that of its model, and whether its steps are compiled."""
    compiled = [(f"{name}{_SUFFIX}", name, True) for name in COMPILED if name in made]
    return [(name, name, False) for name in made] + (compiled if batch == 1 else [])


def check(made: dict[str, Any], prompt: Tensor, new_tokens: int) -> None:
    """Exit if a cache changes a token, or if softmax differs from Llama."""
    found = {
        name: Decoder(made[of], prompt, new_tokens, compiled)()
        for name, of, compiled in contestants(made, len(prompt))
    }
    expected = {name: uncached(model, prompt, new_tokens) for name, model in made.items()}
    wrong = [
        name
        for name, of, _ in contestants(made, len(prompt))
        if not torch.equal(found[name], expected[of])
    ]
    if wrong:
        raise SystemExit(f"Not timed: tokens with and without a cache differ: {wrong}.")
    if "softmax" in found and not torch.equal(found["softmax"], found["llama"]):
        raise SystemExit("Not timed: softmax and Llama choose different tokens.")


def cell(
    made: dict[str, Any], prompt: Tensor, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one length."""
    device, new_tokens = arguments.device, arguments.new_tokens
    options = {"device": device, "patience": arguments.patience}
    reading: dict[str, measure.Work] = {
        name: lambda model=model: Decoder(model, prompt, 0)  # type: ignore[misc]
        for name, model in made.items()
    }
    prompts = measure.seconds(reading, min(arguments.rounds, measure.LEAST_ROUNDS), **options)
    entered = contestants(made, len(prompt))
    decoders = {
        name: Decoder(made[of], prompt, new_tokens, compiled) for name, of, compiled in entered
    }
    models_of = {name: made[of] for name, of, _ in entered}
    times = measure.seconds(decoders, arguments.rounds, **options)
    found = measure.measured(decoders, times, "llama", device)
    rows = []
    for name, decoder in decoders.items():
        # Bytes moved: the weights without the embedding, and the cache; a state is also written.
        model = models_of[name]
        embedding = model.get_input_embeddings().weight
        weights = sum(x.nbytes for x in model.parameters()) - embedding.nbytes
        recurrent = isinstance(decoder.cache, RecurrentCache)
        moved = weights + decoder.nbytes * (2 if recurrent else 1)
        passes_per_second = new_tokens / found[name]["seconds"]["median"]
        rows.append(
            {
                "name": name,
                "cache": "states" if recurrent else "keys and values",
                "length": prompt.shape[1],
                "batch": prompt.shape[0],
                **found[name],
                "tokens_per_second": prompt.shape[0] * passes_per_second,
                "prompt_seconds": measure.summary(prompts[name.removesuffix(_SUFFIX)]),
                "cache_bytes": decoder.nbytes,
                "bytes_per_second": moved * passes_per_second,
            }
        )
    return rows


@torch.no_grad()  # as `generate()`
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check, then measure; everything as plain data."""
    device = arguments.device
    config = run_config(arguments.preset)
    result = measure.opening("decode", arguments)
    only = arguments.only
    variants = [name for name in VARIANTS if only is None or name in only]
    made = models(config, variants, device)
    if only is None or "converted" in only:
        made["converted"] = sr.convert(copy.deepcopy(made["llama"]), CONVERTED)
    wanted = made if only is None else dict.fromkeys(["llama", *only])
    made = {name: made[name].eval() for name in wanted}
    prompted, new_tokens = CHECKED
    check(made, tokens(config, (1, prompted), device), new_tokens)
    made = {name: model.to(measure.DTYPES[device]) for name, model in made.items()}
    rows: list[dict[str, Any]] = []
    shapes = [(n, t) for n in arguments.batches for t in arguments.lengths if t <= BATCHES[n]]
    for batch, length in track(shapes, description="prompts", transient=True):
        # All weights of a batch of long prompts would take gigabytes.
        these = made if batch == 1 else {k: v for k, v in made.items() if "material" not in k}
        rows += cell(these, tokens(config, (batch, length), device), arguments)
    return {
        **result,
        "preset": arguments.preset,
        "dtype": str(measure.DTYPES[device]),
        "new_tokens": arguments.new_tokens,
        "reference": "llama",
        "rows": rows,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as a table."""
    table = measure.table(
        "batch",
        "prompt",
        "name",
        "tokens/s",
        "time / Llama [quartiles]",
        "prompt ms",
        "cache KiB",
        "GB/s",
    )
    for row in result["rows"]:
        if row["name"] == "llama":
            table.add_section()
        table.add_row(
            str(row["batch"]),
            str(row["length"]),
            row["name"],
            f"{row['tokens_per_second']:,.0f}",
            measure.spread(row["ratio"]),
            f"{1e3 * row['prompt_seconds']['median']:,.1f}",
            f"{row['cache_bytes'] / 1024:,.0f}",
            f"{row['bytes_per_second'] / 1e9:.2f}",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=15, patience=30.0)
    options.add_argument("--preset", choices=list(VOCABULARY))
    names = ["llama", "llama materialised", *VARIANTS, "converted"]
    options.add_argument("--only", nargs="+", choices=names, help="of the contestants, and Llama")
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of prompts")
    choices: dict[str, Any] = {"type": int, "choices": list(BATCHES), "default": list(BATCHES)}
    options.add_argument("--batches", nargs="+", **choices, help="numbers of prompts")
    options.add_argument("--new-tokens", type=int, default=32, help="tokens decoded in a round")
    arguments = measure.parsed(options, argv)
    arguments.preset = arguments.preset or PRESET[arguments.device]
    return measure.carry_out(arguments, run, show, judge)


if __name__ == "__main__":
    raise SystemExit(main())
