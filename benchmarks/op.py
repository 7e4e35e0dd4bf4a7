"""The attention op, forward and backward: our forms, SDPA, N x N weights, installed peers.

    python -m benchmarks.op                  # CPU: float32, B=1 H=8 D=64, T = 512 to 8192
    python -m benchmarks.op --device cuda    # bfloat16, D=64 and 128, T = 1024 to 65536

Before anything is timed, the output and gradients of every contestant are compared with the dense
float64 definition. Ratios are relative to SDPA, paired by round. On a GPU a batch has 16384 tokens
(at least one sequence) and a model width of 1024.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import softmax_rnn as sr
from benchmarks import measure
from benchmarks.contestants import CHUNKS, Contestant, contestants, installed
from benchmarks.targets import judge
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.monomials import state_rows
from softmax_rnn.ops.plan import planned

LENGTHS = {
    "cpu": (512, 1024, 2048, 4096, 8192),
    "cuda": (1024, 4096, 16384, 65536),
}
WIDTHS = {"cpu": (64,), "cuda": (64, 128)}
TOKENS, MODEL_WIDTH = 16384, 1024
TOLERANCE = {"cpu": 1e-5, "cuda": 3e-2}
CHECKED = {"cpu": 384, "cuda": 3 * max(CHUNKS)}  # tokens: several blocks and chunks
PASSES = 3  # a backward pass has two products for each of the forward pass
_TENSORS = 11  # q, k, v, out; q, k, v and out's gradient again; the gradients of q, k, v


def flop(variant: str, length: int, width: int) -> float:
    """Useful floating-point operations of a head, forward and backward.

    Counted are two products for each visible pair of query and key, or the updates and reads of a
    finite series' states, whichever is less; and twice that for the backward pass. Recomputation,
    masked pairs, weights and monomials are not counted.
    """
    spec = sr.variant(variant)
    products = length * (length + 1) / 2
    if spec.has_state:
        products = min(products, length * state_rows(spec, width))
    return PASSES * 4.0 * width * products


def inputs(
    length: int, *, batch: int, heads: int, width: int, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v, a gate, and the gradient of the output."""
    draw = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(batch, heads, length, width, generator=draw, device=device, dtype=dtype)

    gate = torch.rand(batch, heads, length, generator=draw, device=device, dtype=dtype)
    qkv = [normal().requires_grad_() for _ in range(3)]
    return [*qkv, gate, normal()]


def step(one: Contestant, data: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v, in the layout of the inputs."""
    q, k, v, gate, upstream = data
    out = one.attend(q, k, v, gate)
    return (out, *torch.autograd.grad(out, (q, k, v), upstream))


def heads_second(data: Sequence[Tensor]) -> list[Tensor]:
    """The same inputs as [B, T, H, D]."""
    return [x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad) for x in data]


def error(one: Contestant, data: Sequence[Tensor]) -> float:
    """The largest relative error of output and gradients against dense in float64."""
    q, k, v, gate, upstream = (x.detach().double() for x in data)
    gates = gate if sr.variant(one.variant).output_gate != "none" else None
    exact = [x.requires_grad_() for x in (q, k, v)]
    out = sr.attention(q, k, v, one.variant, output_gate=gates, form="dense")
    expected = (out, *torch.autograd.grad(out, exact, upstream))
    found = step(one, data if one.heads_first else heads_second(data))
    if not one.heads_first:
        found = tuple(x.transpose(1, 2) for x in found)
    return measure.relative_error(list(zip(found, expected, strict=True)))


def checked(device: str, width: int) -> tuple[list[Contestant], dict[str, float], dict[str, str]]:
    """The contestants to time, every error, and why the others are not timed.

    Raises:
        SystemExit: if an implementation of ours is wrong.
    """
    data = inputs(
        CHECKED[device], batch=2, heads=2, width=width, device=device, dtype=measure.DTYPES[device]
    )
    able: list[Contestant] = []
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for one in contestants(device):
        try:
            found = error(one, data)
        except Exception as problem:
            if one.ours:
                raise
            reasons[one.name] = f"{type(problem).__name__}: {problem}"[:200]
            continue
        # Rounding a score to the dtype can move it across the clamp.
        if found <= TOLERANCE[device] * (10 if one.materialises else 1):
            errors[one.name] = found
            able.append(one)
        elif one.ours:
            raise SystemExit(f"Not timed: {one.name} has relative error {found:.1e}.")
        else:
            reasons[one.name] = f"relative error {found:.1e}"
    return able, errors, reasons


def form_of(one: Contestant, data: Sequence[Tensor]) -> str | None:
    """The form that computes a contestant of ours."""
    if one.form != "auto":
        return one.form
    q, k, v = data[:3]
    return planned(Call(q, k, v, sr.variant(one.variant)), part=True).name


def cell(
    length: int, width: int, able: list[Contestant], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one length and width."""
    device = arguments.device
    cuda = device == "cuda"
    batch = arguments.batch or (max(1, TOKENS // length) if cuda else 1)
    heads = arguments.heads or (MODEL_WIDTH // width if cuda else 8)
    sizes = {"length": length, "batch": batch, "heads": heads, "width": width}
    dtype = measure.DTYPES[device]
    data = inputs(**sizes, device=device, dtype=dtype)
    turned = data
    if not all(one.heads_first for one in able):
        turned = heads_second(data)
    here = {
        one.name: one for one in able if length <= arguments.materialise_to or not one.materialises
    }
    work: dict[str, measure.Work] = {
        name: partial(step, one, data if one.heads_first else turned) for name, one in here.items()
    }
    options = {"device": device, "patience": arguments.patience, "events": cuda}
    times = measure.seconds(work, arguments.rounds, **options)
    found = measure.measured(work, times, "sdpa", device)
    rows = []
    for name, one in here.items():
        median = found[name]["seconds"]["median"]
        moved = _TENSORS * batch * heads * length * width * dtype.itemsize
        rows.append(
            {
                "name": name,
                "variant": one.variant,
                "form": form_of(one, data),
                **sizes,
                **found[name],
                "flop_per_second": batch * heads * flop(one.variant, length, width) / median,
                "bytes_per_second": moved / median,
            }
        )
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check, then measure; returns plain data."""
    device = arguments.device
    result = measure.opening("op", arguments)
    peers, rows, errors, reasons = installed(), [], {}, {}
    for width in arguments.widths:
        able, errors[str(width)], reasons[str(width)] = checked(device, width)
        for length in track(arguments.lengths, description=f"D={width}", transient=True):
            rows += cell(length, width, able, arguments)
    if device == "cpu":
        found = [name for name, version in peers.items() if version]
        reasons["cpu"] = dict.fromkeys(found, "runs on a GPU only")
    return {
        **result,
        "dtype": str(measure.DTYPES[device]),
        "reference": "sdpa",
        "errors": errors,
        "peers": [version for version in peers.values() if version],
        "not_installed": [name for name, version in peers.items() if not version],
        "not_timed": {key: value for key, value in reasons.items() if value},
        "rows": rows,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The rows as a table."""
    columns = ("D", "T", "name", "ms", "/ SDPA [quartiles]", "extra MiB", "TFLOP/s", "GB/s")
    table = measure.table(*columns)
    for row in result["rows"]:
        if row["name"] == "sdpa":
            table.add_section()
        table.add_row(
            str(row["width"]),
            str(row["length"]),
            row["name"],
            f"{1e3 * row['seconds']['median']:.2f}",
            measure.spread(row["ratio"]),
            f"{row['peak_extra_bytes'] / 2**20:,.1f}",
            f"{row['flop_per_second'] / 1e12:.3f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
        )
    console.print(table)
    top = result["ceiling"]
    console.print(
        f"ceiling ({top['how']}): {top['flop_per_second'] / 1e12:.3f} TFLOP/s, "
        f"{top['bytes_per_second'] / 1e9:.1f} GB/s"
    )
    if result["not_installed"]:
        console.print(f"not installed: {', '.join(result['not_installed'])}")
    for names in result["not_timed"].values():
        for name, reason in names.items():
            console.print(f"not timed: {name}: {reason}")


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser(__doc__, rounds=15, patience=60.0)
    options.add_argument("--lengths", type=int, nargs="+")
    options.add_argument("--widths", type=int, nargs="+", help="widths of a head")
    options.add_argument("--batch", type=int)
    options.add_argument("--heads", type=int)
    options.add_argument("--materialise-to", type=int, default=4096, help="longest N x N run")
    arguments = measure.parsed(options, argv)
    arguments.lengths = arguments.lengths or LENGTHS[arguments.device]
    arguments.widths = arguments.widths or WIDTHS[arguments.device]
    return measure.carry_out(arguments, run, show, judge)


if __name__ == "__main__":
    raise SystemExit(main())
