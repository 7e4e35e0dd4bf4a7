"""Inputs for the Triton kernels, and how to check what they make of them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close
from softmax_rnn.ops.spec import AttentionSpec

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}


KERNELS = "softmax_rnn.ops.forms.gpu.pair_kernels"


TILES = "softmax_rnn.ops.forms.gpu.tiles"
CHUNK_KERNELS = (
    "softmax_rnn.ops.forms.gpu.chunk_kernels",
    "softmax_rnn.ops.forms.gpu.state_tiles",
)


SMALL = Shape(batch=1, heads=2, kv_heads=1, queries=37, keys=41)


SHIFTED, BOUNDED = AttentionSpec(), AttentionSpec(clamp=0.5, denominator="none")


COMPUTED = {name: spec for name, spec in WIDENED.items() if spec.decay != "channel"}


def forget_the_kernels() -> None:
    """The next import decides anew whether Triton compiles or interprets them."""
    for module in (KERNELS, TILES, *CHUNK_KERNELS):
        sys.modules.pop(module, None)


def run(case: Case, device: str, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """Output and every gradient, and what they should be, of inputs that the type holds exactly."""
    tensors = {name: x.to(dtype).double() for name, x in case.tensors.items()}
    case = dataclasses.replace(case, tensors=tensors, upstream=case.upstream.to(dtype).double())
    expected = case.run(sr.attention, form="dense")
    there = dataclasses.replace(
        case,
        tensors={name: x.to(device) for name, x in tensors.items()},
        mask=None if case.mask is None else case.mask.to(device),
        upstream=case.upstream.to(device),
    )
    found = {name: x.cpu() for name, x in there.run(sr.attention, dtype, form="triton").items()}
    return [found, expected]


def check(case: Case, device: str, dtype: torch.dtype = torch.float64) -> None:
    assert_close(*run(case, device, dtype), TOLERANCE[dtype], str(dtype))


def python(code: str, tmp_path: Path) -> str:
    """What a Python of its own prints."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "TRITON_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
