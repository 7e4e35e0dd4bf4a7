"""Everything that needs a GPU, in the order of its importance and within some minutes.

    python -m benchmarks.gpu_session                # within 9 minutes
    python -m benchmarks.gpu_session --minutes 20

First every kind of kernel proves itself (`ops/forms/gpu/proof.py`), then the tests run that need a
GPU, then the benchmarks. The result is written after each step (`benchmarks/results`), and the
benchmarks write their own files. A step that takes too long is stopped, and the next one begins.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import softmax_rnn as sr
from benchmarks import measure
from softmax_rnn._utils.files import write_json
from softmax_rnn.ops.forms.gpu import proof
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.plan import triton_chunks_refuse
from softmax_rnn.ops.signature import signature

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (64, 128)
PROVED = ("gate", "taylor:2", "taylor:4", "linear_elu", "norm_rms", "window:64", "power:1")
ROOT = Path(__file__).parents[1]
# What follows the proofs: words after `python -m`, and the most minutes that they may take.
STEPS: dict[str, tuple[list[str], float]] = {
    "tests": (["pytest", "-q", "-x", "--maxfail", "10", "tests/ops/forms/test_cuda.py"], 2.5),
    "kernels": (["pytest", "-q", "--maxfail", "10", "tests/ops/forms/test_triton_chunks.py"], 1.0),
    "op": (["benchmarks.op", "--device", "cuda", "--rounds", "20"], 2.0),
    "step": (["benchmarks.step", "--device", "cuda", "--rounds", "20"], 1.5),
    "decode": (["benchmarks.decode", "--device", "cuda", "--rounds", "5"], 1.0),
    "recurrence": (["benchmarks.recurrence", "--device", "cuda", "--rounds", "10"], 1.0),
}


def proofs(device: torch.device, end: float) -> list[dict[str, Any]]:
    """What each kind of kernel, dtype and width has shown; empty for one that is right.

    None begins after ``end``, a time of ``time.perf_counter``.
    """
    rows: list[dict[str, Any]] = []
    for width in WIDTHS:
        for dtype in DTYPES:
            for name in PROVED:
                spec = sr.variant(name)
                x = torch.empty(1, 1, 64, width, dtype=dtype, device=device)
                of_call = signature(Call(x, x, x, spec))
                kinds: list[proof.Kind] = ["pairs"]
                kinds += [] if triton_chunks_refuse(of_call, 64) else ["chunks"]
                for kind in kinds:
                    begun = time.perf_counter()
                    if begun > end:
                        return rows
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        found = proof.failure(kind, spec, dtype, width, width, device)
                    row = {"kind": kind, "name": name, "dtype": str(dtype), "width": width}
                    took = time.perf_counter() - begun
                    rows.append(row | {"failure": found, "seconds": round(took, 2)})
    return rows


def step(words: Sequence[str], seconds: float) -> dict[str, Any]:
    """The exit code of a command (``None`` if it was stopped), how long it took, what it said."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", *words]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as stopped:
        code, said = None, str(stopped.stdout or "")
    took = round(time.perf_counter() - begun, 1)
    return {"command": " ".join(words), "code": code, "seconds": took, "end": said[-3000:]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps that fit; 1 if one fails."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=9.0, help="for all steps together")
    options.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS))
    options.add_argument("--out", type=Path, default=measure.RESULTS / "gpu-session.json")
    arguments = options.parse_args(argv)
    device, console = torch.device("cuda"), Console()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU: benchmarks.kernels says what the compiler can say.")
    end = time.perf_counter() + 60 * arguments.minutes
    result: dict[str, Any] = {
        "machine": measure.machine(),
        "proofs": proofs(device, end - 30 * arguments.minutes),
    }
    wrong = [row for row in result["proofs"] if row["failure"]]
    console.print(f"{len(result['proofs'])} kernels tried, {len(wrong)} not believed")
    write_json(arguments.out, result)
    for name in arguments.steps:
        words, minutes = STEPS[name]
        left = end - time.perf_counter()
        if left < 10.0:
            result[name] = {"command": " ".join(words), "code": None, "end": "no time was left"}
        else:
            result[name] = step(words, min(60 * minutes, left))
        console.print(f"{name}: {result[name]['code']}")
        write_json(arguments.out, result)
    failed = any(result[name]["code"] != 0 for name in arguments.steps)
    return int(failed or bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
