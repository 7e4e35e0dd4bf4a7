"""A converted model generates thousands of tokens: its cache must not grow, nor its logits drift.

    python -m benchmarks.long_generation runs/smol/model --tokens 2000

The likeliest token of each step is the next input. Afterwards one pass over the whole text, without
a cache, must give the same logits. The memory of the process is measured as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import track

from benchmarks import measure
from softmax_rnn.models.cache_sizes import cache_bytes
from softmax_rnn.training.opening import open_model

PROMPT = "The theory of evolution by natural selection was first formulated in"
TOLERANCE = 1e-3  # of logits, relative to the largest


@torch.no_grad()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate, and compare with one pass."""
    model, tokenizer, _, _ = open_model(arguments.model)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    cache, sizes, resident, new = model.new_cache(), [], [], ids
    # Written at once, so that what is kept for the comparison adds nothing while it generates.
    found = torch.ones(arguments.tokens, model.config.vocab_size)
    for token in track(range(arguments.tokens), "Generating", console=Console(stderr=True)):
        out = model(new, past_key_values=cache, use_cache=True).logits[:, -1]
        found[token] = out[0]
        new = out.argmax(-1, keepdim=True)
        ids = torch.cat((ids, new), dim=1)
        sizes.append(cache_bytes(cache))
        resident.append(psutil.Process().memory_info().rss)
    whole = model(ids[:, :-1], use_cache=False).logits[0, -arguments.tokens :]
    error = float((found - whole).abs().max() / whole.abs().max())
    half = len(resident) // 2
    return {
        **measure.opening("long_generation", arguments),
        "tokens": arguments.tokens,
        "cache_bytes": sorted(set(sizes)),
        "resident_bytes": {"halfway": resident[half], "end": resident[-1]},
        "error": error,
        "same_choices": float((found.argmax(-1) == whole.argmax(-1)).float().mean()),
        "text": tokenizer.decode(ids[0])[:2000],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the sizes and the error."""
    table = measure.table("tokens", "cache MiB", "process MiB, halfway", "at the end", "error")
    memory = result["resident_bytes"]
    table.add_row(
        f"{result['tokens']:,}",
        ", ".join(f"{size / 2**20:.2f}" for size in result["cache_bytes"]),
        *(f"{memory[name] / 2**20:,.0f}" for name in ("halfway", "end")),
        f"{result['error']:.1e}",
    )
    console.print(table)


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether the cache kept its size, and the logits are those without a cache."""
    sizes, error = len(result["cache_bytes"]), result["error"]
    return [
        {"what": "sizes of the cache", "found": sizes, "limit": "= 1", "holds": sizes == 1},
        {
            "what": "largest difference of logits, relative to the largest logit",
            "found": error,
            "limit": f"<= {TOLERANCE}",
            "holds": error <= TOLERANCE,
        },
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=1)
    options.add_argument("model", help="a converted model")
    options.add_argument("--tokens", type=int, default=2000)
    return measure.carry_out(measure.parsed(options, argv), run, show, judge)


if __name__ == "__main__":
    raise SystemExit(main())
