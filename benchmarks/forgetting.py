"""Decays and windows, forward and backward, beside SDPA over all keys.

    python -m benchmarks.forgetting          # float32, B=1 H=8 D=64, T = 2048 and 8192

Log decays are ``logsigmoid(x + 2)`` of normal ``x``, with which a key has faded to 1/e after five
tokens, and to nothing after several hundred; the slow ones are a thousandth of it. Before anything
is timed, output and gradients are compared with the dense float64 definition.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

import softmax_rnn as sr
from benchmarks import measure
from benchmarks.targets import judge

LENGTHS, WIDTH = (2048, 8192), 64
CHECKED, TOLERANCE = 700, 2e-5  # tokens: several blocks, and keys that fade to zero
_ELU = sr.variant("linear_elu")
# Each spec with its form and the factor of its log decays.
SPECS: dict[str, tuple[sr.AttentionSpec, str, float]] = {
    "token decay": (sr.AttentionSpec(decay="token"), "auto", 1.0),
    "slow token decay": (sr.AttentionSpec(decay="token"), "auto", 1e-3),
    "window 256": (sr.AttentionSpec(window=256), "auto", 0.0),
    "window 256, 4 global keys": (sr.AttentionSpec(window=256, global_keys=4), "auto", 0.0),
    "window 256, token decay": (sr.AttentionSpec(window=256, decay="token"), "auto", 1.0),
    "linear_elu": (_ELU, "chunked", 0.0),
    "linear_elu, token decay": (replace(_ELU, decay="token"), "chunked", 1.0),
}


def inputs(length: int, heads: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, the gradient of the output, and log decays."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*width: int) -> Tensor:
        size = (1, heads, length, *width)
        return torch.randn(size, generator=draw, device=device, dtype=torch.float32)

    qkv = [normal(WIDTH).to(dtype).requires_grad_() for _ in range(3)]
    return [*qkv, normal(WIDTH).to(dtype), F.logsigmoid(normal() + 2)]


def step(name: str, data: Sequence[Tensor], form: str | None = None) -> tuple[Tensor, ...]:
    """The output and every gradient of a row of the table."""
    q, k, v, upstream, log_decay = data
    if name == "sdpa":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out, *torch.autograd.grad(out, (q, k, v), upstream))
    spec, own, factor = SPECS[name]
    given: dict[str, Any] = (
        {} if spec.decay == "none" else {"log_decay": (factor * log_decay).requires_grad_()}
    )
    out = sr.attention(q, k, v, spec, form=form or own, **given)
    return (out, *torch.autograd.grad(out, (q, k, v, *given.values()), upstream))


def checked(device: str) -> dict[str, float]:
    """The largest relative error of every spec.

    Raises:
        SystemExit: if one is too large.
    """
    data = inputs(CHECKED, 2, device, measure.DTYPES[device])
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in data]
    tolerance = TOLERANCE if device == "cpu" else 3e-2
    errors = {}
    for name in SPECS:
        pairs = zip(step(name, data), step(name, exact, "dense"), strict=True)
        errors[name] = measure.relative_error(list(pairs))
        if errors[name] > tolerance:
            raise SystemExit(f"Not timed: {name} has relative error {errors[name]:.1e}.")
    return errors


def cell(length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one length."""
    device = arguments.device
    data = inputs(length, arguments.heads, device, measure.DTYPES[device])
    work: dict[str, measure.Work] = {name: partial(step, name, data) for name in ("sdpa", *SPECS)}
    options = {"device": device, "patience": arguments.patience, "events": device == "cuda"}
    times = measure.seconds(work, arguments.rounds, **options)
    found = measure.measured(work, times, "sdpa", device)
    sizes = {"length": length, "batch": 1, "heads": arguments.heads, "width": WIDTH}
    return [{"name": name, **sizes, **found[name]} for name in work]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check, then measure; returns plain data."""
    result = measure.opening("forgetting", arguments)
    errors = checked(arguments.device)
    lengths = track(arguments.lengths, transient=True)
    return {
        **result,
        "dtype": str(measure.DTYPES[arguments.device]),
        "threads": torch.get_num_threads(),
        "reference": "sdpa",
        "errors": errors,
        "rows": [row for length in lengths for row in cell(length, arguments)],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as a table."""
    table = measure.table("T", "name", "ms", "/ SDPA [quartiles]", "extra MiB")
    for row in result["rows"]:
        if row["name"] == "sdpa":
            table.add_section()
        time, extra = 1e3 * row["seconds"]["median"], row["peak_extra_bytes"] / 2**20
        ratio = measure.spread(row["ratio"])
        table.add_row(str(row["length"]), row["name"], f"{time:.1f}", ratio, f"{extra:,.1f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=15, patience=60.0)
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--heads", type=int, default=8)
    return measure.carry_out(measure.parsed(options, argv), run, show, judge)


if __name__ == "__main__":
    raise SystemExit(main())
