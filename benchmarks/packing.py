"""Packed rows (``segments``) against padding, on the lengths of real texts: a layer, both passes.

    python -m benchmarks.packing                # CPU: docstrings of Python's standard library
    python -m benchmarks.packing --device cuda

A batch of docstrings, in bytes, is one row of segments, or one padded row for each. Before anything
is timed, outputs and gradients of both are compared with those of the texts one by one, in float64.
Ratios are relative to padding, paired by round; a token is one of a text.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import softmax_rnn as sr
from benchmarks import measure

VARIANTS = ("softmax", "norm", "taylor:2", "taylor:2+decay", "linear_elu", "window:64")
HIDDEN, HEADS, LONGEST = 256, 4, 2048
TOLERANCE = 1e-10  # in float64
CHECKED = 6  # texts

Step = Callable[[sr.Attention, Sequence[Tensor], Tensor], tuple[Tensor, ...]]


def lengths(count: int) -> list[int]:
    """The lengths in bytes, at most LONGEST, of docstrings drawn from the standard library."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    nodes = (node for path in modules for node in ast.walk(ast.parse(path.read_bytes())))
    kinds = ast.FunctionDef, ast.ClassDef
    docs = (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))
    found = [min(LONGEST, len(text.encode())) for text in docs if text]
    return random.Random(0).sample(found, count)


def one_by_one(
    layer: sr.Attention, texts: Sequence[Tensor], upstream: Tensor
) -> tuple[Tensor, ...]:
    """Output [tokens, HIDDEN] and gradients of the parameters, a text at a time."""
    return _gradients(layer, torch.cat([layer(x[None])[0] for x in texts]), upstream)


def packed(layer: sr.Attention, texts: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """The same, all texts in one row."""
    sizes = torch.tensor([len(x) for x in texts])
    ids = torch.repeat_interleave(torch.arange(len(texts)), sizes).to(upstream.device)
    return _gradients(layer, layer(torch.cat(list(texts))[None], segments=ids[None])[0], upstream)


def padded(layer: sr.Attention, texts: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """The same, each text in a row, padded on the right to the longest."""
    rows = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    sizes = torch.tensor([len(x) for x in texts], device=upstream.device)
    shown = torch.arange(rows.shape[1], device=upstream.device) < sizes[:, None]
    return _gradients(layer, layer(rows, shown[:, None, None])[shown], upstream)


def _gradients(layer: sr.Attention, out: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    return out, *torch.autograd.grad(out, list(layer.parameters()), upstream)


def check(variant: str, sizes: Sequence[int], device: str) -> dict[str, float]:
    """The relative errors of both ways against the texts one by one; ``SystemExit`` if wrong."""
    layer = sr.Attention(HIDDEN, HEADS, variant).double().to(device)
    texts = [torch.randn(n, HIDDEN, dtype=torch.float64, device=device) for n in sizes]
    upstream = torch.randn(sum(sizes), HIDDEN, dtype=torch.float64, device=device)
    expected = one_by_one(layer, texts, upstream)
    errors = {}
    for name, way in WAYS.items():
        pairs = list(zip(way(layer, texts, upstream), expected, strict=True))
        errors[name] = measure.relative_error(pairs)
        if not errors[name] <= TOLERANCE:
            raise SystemExit(
                f"{variant}, {name}: an error of {errors[name]:.2g}; nothing is timed."
            )
    return errors


WAYS: dict[str, Step] = {"padded": padded, "packed": packed}


def run(arguments: Any) -> dict[str, Any]:
    """Check, then measure; returns plain data."""
    device, sizes = arguments.device, lengths(arguments.texts)
    result = measure.opening("packing", arguments)
    torch.manual_seed(0)
    rows, errors = [], {}
    for variant in VARIANTS:
        errors[variant] = check(variant, sizes[:CHECKED], device)
        dtype = measure.DTYPES[device]
        layer = sr.Attention(HIDDEN, HEADS, variant).to(device, dtype)
        texts = [torch.randn(n, HIDDEN, dtype=dtype, device=device) for n in sizes]
        upstream = torch.randn(sum(sizes), HIDDEN, dtype=dtype, device=device)
        work = {
            name: (lambda way=way, given=(layer, texts, upstream): way(*given))
            for name, way in WAYS.items()
        }
        times = measure.seconds(work, arguments.rounds, device=device, patience=arguments.patience)
        for name, row in measure.measured(work, times, "padded", device).items():
            speed = sum(sizes) / row["seconds"]["median"]
            rows.append({"name": name, "variant": variant, **row, "tokens_per_second": speed})
    return {
        **result,
        "dtype": str(measure.DTYPES[device]),
        "reference": "padded",
        "lengths": sizes,
        "filled": sum(sizes) / (len(sizes) * max(sizes)),
        "errors": errors,
        "rows": rows,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as a table."""
    table = measure.table("name", "way", "tokens/s", "ms", "/ padded [quartiles]", "extra MiB")
    for row in result["rows"]:
        table.add_row(
            row["variant"],
            row["name"],
            f"{row['tokens_per_second']:,.0f}",
            f"{1e3 * row['seconds']['median']:.0f}",
            measure.spread(row["ratio"]),
            f"{row['peak_extra_bytes'] / 2**20:,.0f}",
        )
    console.print(table)
    sizes = result["lengths"]
    console.print(
        f"{len(sizes)} texts of {min(sizes)} to {max(sizes)} bytes, {sum(sizes):,} in all; padded "
        f"rows are filled to {100 * result['filled']:.0f}%"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=9, patience=60.0)
    options.add_argument("--texts", type=int, default=24, help="docstrings of the batch")
    return measure.carry_out(measure.parsed(options, argv), run, show, lambda _: [])


if __name__ == "__main__":
    raise SystemExit(main())
