"""The attention op, forward and backward: our forms, SDPA, and the N x N way.

    python -m benchmarks.op                      # CPU: B=1 H=8 D=64, T = 1024, 2048, 8192
    python -m benchmarks.op --device cuda        # bf16, B=4 H=16, T = 1024, 4096, 16384

Every contestant is held to the dense float64 definition, output and gradients, before a time is
taken. Ratios are to SDPA, paired round by round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import softmax_rnn as sr
from benchmarks.measure import peak_extra_bytes, ratios, seconds, summary
from softmax_rnn.files import write_json
from softmax_rnn.training.environment import environment

VARIANTS = ("softmax", "norm", "gate", "taylor:10", "linear_elu")
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Expectation:
    """What we expect of a ratio, written down before measuring."""

    what: str
    of: str
    to: str
    length: int
    at_most: float


# Time ratios on a CPU, forward and backward.
EXPECTED = (
    Expectation("time", "norm", "sdpa", 1024, 1.4),
    Expectation("time", "norm", "sdpa", 2048, 1.4),
    Expectation("time", "gate", "sdpa", 1024, 1.7),
    Expectation("time", "gate", "sdpa", 2048, 1.7),
    Expectation("time", "norm", "materialised norm", 2048, 1 / 3.5),
    Expectation("time", "gate", "materialised gate", 2048, 1 / 3.5),
)
MEMORY_GROWTH = (("norm", 2048, 8192, 4.5), ("gate", 2048, 8192, 4.5))


def contestants() -> dict[str, tuple[str, Attend]]:
    """Name -> (the variant it computes, the function of q, k, v and a gate per query)."""
    entries: dict[str, tuple[str, Attend]] = {
        "sdpa": (
            "softmax",
            lambda q, k, v, g: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
    }
    for name in VARIANTS:
        entries[name] = (name, _ours(name))
    for name in ("norm", "gate"):
        entries[f"materialised {name}"] = (name, _materialised(name))
    return entries


def _sdpa(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _ours(name: str) -> Attend:
    gated = sr.variant(name).output_gate != "none"
    return lambda q, k, v, g: sr.attention(q, k, v, name, output_gate=g if gated else None)


def _materialised(name: str) -> Attend:
    """The paper's way: all N x N weights, recomputed in the backward pass (checkpointed)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        scores = (q @ k.mT) / q.shape[-1] ** 0.5
        length = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=q.dtype)[:, None]
        if name == "norm":
            return F.normalize(scores.exp().tril() @ v, dim=-1)
        weights = scores.clamp(max=5).exp().tril() / length
        return gate[..., None] * (weights @ v)

    return lambda q, k, v, g: checkpoint(attend, q, k, v, g, use_reentrant=False)


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


def check(name: str, device: str, dtype: torch.dtype) -> float:
    """The largest relative error of output and gradients against dense in float64."""
    variant, attend = contestants()[name]
    q, k, v, gate, upstream = inputs(320, batch=2, heads=2, width=64, device=device, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    gates = gate.double() if sr.variant(variant).output_gate != "none" else None
    qe, ke, ve = exact
    expected = sr.attention(qe, ke, ve, variant, output_gate=gates, form="dense")
    found = attend(q, k, v, gate)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, (q, k, v), upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    )
    return max(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check, then measure; everything as plain data."""
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    tolerance = 1e-5 if arguments.device == "cpu" else 3e-2
    sizes = {"batch": arguments.batch, "heads": arguments.heads, "width": arguments.width}
    errors = {name: check(name, arguments.device, dtype) for name in contestants()}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        raise SystemExit(f"Not timed: wrong results, relative errors {wrong} > {tolerance}.")
    rows = []
    for length in track(arguments.lengths, description="lengths", transient=True):
        q, k, v, gate, upstream = inputs(length, device=arguments.device, dtype=dtype, **sizes)

        def step(attend: Attend, data: tuple[Tensor, ...] = (q, k, v, gate, upstream)) -> None:
            q, k, v, gate, upstream = data
            torch.autograd.grad(attend(q, k, v, gate), (q, k, v), upstream)

        work = {
            name: (lambda attend=attend: step(attend))
            for name, (_, attend) in contestants().items()
            if length <= arguments.materialise_to or not name.startswith("materialised")
        }
        times = seconds(work, arguments.rounds)
        rows += [
            {
                "name": name,
                "length": length,
                "seconds": summary(times[name]),
                "ratio_to_sdpa": ratios(times[name], times["sdpa"]),
                "rounds": times[name],
                "peak_extra_bytes": peak_extra_bytes(work[name]),
            }
            for name in work
        ]
    return {
        "benchmark": "op",
        "command": " ".join(["python -m benchmarks.op", *sys.argv[1:]]),
        "device": arguments.device,
        "dtype": str(dtype),
        **sizes,
        "errors": errors,
        "rows": rows,
        "environment": environment(),
    }


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every expectation that this run can answer, with what was found."""
    rows = {(row["name"], row["length"]): row for row in result["rows"]}
    answers = []
    for expected in EXPECTED if result["device"] == "cpu" else ():
        of, to = (rows.get((name, expected.length)) for name in (expected.of, expected.to))
        if of and to:
            found = ratios(of["rounds"], to["rounds"])["median"]
            text = f"time of {expected.of} / {expected.to} at T={expected.length}"
            answers.append(_verdict(text, found, expected.at_most))
    for name, short, long, at_most in MEMORY_GROWTH:
        if (name, short) in rows and (name, long) in rows:
            growth = rows[name, long]["peak_extra_bytes"] / rows[name, short]["peak_extra_bytes"]
            text = f"peak extra memory of {name}, T={long} / T={short}"
            answers.append(_verdict(text, growth, at_most))
    return answers


def _verdict(what: str, found: float, at_most: float) -> dict[str, Any]:
    return {"what": what, "found": found, "at_most": at_most, "holds": found <= at_most}


def show(result: dict[str, Any], console: Console) -> None:
    """The rows and the verdicts as tables."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("T", "name", "ms", "/ SDPA [quartiles]", "peak extra MiB", "error"):
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    for row in result["rows"]:
        ratio = row["ratio_to_sdpa"]
        if row["name"] == "sdpa":
            table.add_section()
        table.add_row(
            str(row["length"]),
            row["name"],
            f"{1e3 * row['seconds']['median']:.1f}",
            f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
            f"{row['peak_extra_bytes'] / 2**20:,.1f}",
            f"{result['errors'][row['name']]:.0e}",
        )
    console.print(table)
    for answer in result["verdicts"]:
        mark = "holds" if answer["holds"] else "FAILS"
        console.print(
            f"{mark}  {answer['what']}: {answer['found']:.2f} (expected <= {answer['at_most']:.2f})"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--materialise-to", type=int, default=4096, help="longest N x N run")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here.")
    cpu = arguments.device == "cpu"
    arguments.lengths = arguments.lengths or ([1024, 2048, 8192] if cpu else [1024, 4096, 16384])
    arguments.batch = arguments.batch or (1 if cpu else 4)
    arguments.heads = arguments.heads or (8 if cpu else 16)
    console = Console(width=100)
    result = run(arguments)
    result["verdicts"] = verdicts(result)
    show(result, console)
    out = arguments.out or Path(__file__).parent / "results" / f"op-{arguments.device}.json"
    write_json(out, result)
    console.print(f"Written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
