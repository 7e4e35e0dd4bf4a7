"""A kernel proves itself before ``form="auto"`` believes it.

On the first use of a kind of kernel on a device, its sums and gradients of a small case are
compared with those of ``dense`` in float64. What is found is kept on disk, under a hash of the
device, its driver, the versions of PyTorch and Triton, and the sources: each is tried once. What
raises an error, as a kernel that does not compile, is tried again by the next process. A kernel
that fails is not used by ``auto``: there is one warning, and the next form computes the call. Who
asks for a form by name gets it.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from softmax_rnn._utils.files import read_small_json, write_json
from softmax_rnn._utils.integrity import sha256
from softmax_rnn._utils.machine import cache_folder, in_proc
from softmax_rnn._utils.trusted import own_folder
from softmax_rnn.ops.compiler import constant_when_compiled
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.chunks.chunked import chunked
from softmax_rnn.ops.forms.gpu.pairs import triton
from softmax_rnn.ops.forms.pairs.dense import dense
from softmax_rnn.ops.forms.row_sums import RowSums, no_autocast
from softmax_rnn.ops.spec import AttentionSpec

Kind = Literal["pairs", "chunks"]

# Several tiles, the last ones short; more keys than queries.
_QUERIES, _KEYS = 130, 150
_HEADS, _KV_HEADS = 4, 2
_WINDOW = 70  # a wider one would hide nothing
_CLAMP = 0.3  # a higher one would bound nothing
# Relative errors that are not rounding. Products of float32 may be TF32.
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 5e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


@constant_when_compiled
def failure(
    kind: Kind,
    spec: AttentionSpec,
    dtype: torch.dtype,
    width: int,
    values: int,
    device: torch.device,
) -> str:
    """Why a kernel is not to be used, in words; empty for one that is right.

    Args:
        kind: ``pairs`` (``pairs.py``) or ``chunks`` (``chunks.py``).
        spec: what is computed; only its weights matter.
        dtype: that of queries, keys and values.
        width: that of queries and keys.
        values: that of values.
        device: a GPU, or the CPU in Triton's interpreter.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return _known(kind, _weights(spec, width), dtype, width, values, device)


def _weights(spec: AttentionSpec, width: int) -> AttentionSpec:
    """A spec that takes the same kernel, with weights of moderate size, and no gates.

    Denominator and norm stay: they say whether scores are shifted.
    """
    scale = math.copysign(1 / math.sqrt(width), spec.score_scale(width))
    bounded = spec.clamp is not None and not spec.shifted
    return replace(
        spec,
        scale=scale,
        clamp=min(spec.clamp or 0.0, _CLAMP) if bounded else spec.clamp,
        input_gate=False,
        output_gate="none",
        window=None if spec.window is None else min(spec.window, _WINDOW),
        global_keys=min(spec.global_keys, 3),
    )


@functools.cache
def _known(kind: Kind, spec: AttentionSpec, dtype: torch.dtype, *where: Any) -> str:
    """As :func:`failure`, from the disk if it was tried before."""
    what = {"kind": kind, "spec": spec.to_dict(), "dtype": str(dtype), **_machine(*where)}
    named = sha256(repr(sorted(what.items())))[:32] + ".json"
    with suppress(OSError, ValueError), own_folder(_folder()) as folder:
        kept = read_small_json(folder / named)
        if isinstance(kept, dict) and isinstance(kept.get("failure"), str):
            return _told(kept["failure"], what)
    try:
        with no_autocast(where[2].type):
            found = _difference(kind, spec, dtype, *where)
    except Exception as problem:  # of this process alone: memory, or one of many that Triton raises
        said = str(problem).strip().partition(os.linesep)[0]
        return _told(f"{type(problem).__name__}: {said}", what)
    with suppress(OSError), own_folder(_folder()) as folder:
        write_json(folder / named, what | {"failure": found})
    return _told(found, what)


def proofs(device: torch.device) -> list[dict[str, Any]]:
    """What was tried on a device as it is now: kind, spec, dtype, widths; empty ``failure``: right.

    Earlier versions of the library, of PyTorch, Triton or the driver have proofs of their own.
    """
    now = _machine(0, 0, device)
    found: list[dict[str, Any]] = []
    if not _folder().is_dir():
        return found
    with own_folder(_folder()) as folder:
        for path in sorted(folder.glob("*.json")):
            with suppress(OSError, ValueError):
                kept = read_small_json(path)
                sizes = {name: kept.get(name) for name in ("width", "values")}
                if kept.items() >= (now | sizes).items():
                    found.append(kept)
    return found


def _told(failure: str, what: dict[str, Any]) -> str:
    if failure:
        warnings.warn(
            f"The Triton kernel of {what['kind']} for {AttentionSpec.from_dict(what['spec'])} and "
            f"{what['dtype']} is not used on {what['device']}: {failure}. Other forms are used "
            "instead, which may be slower.",
            stacklevel=2,
        )
    return failure


def _folder() -> Path:
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    return cache_folder() / f"kernels-{user}"


def _machine(width: int, values: int, device: torch.device) -> dict[str, Any]:
    """Everything else that a result depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return {
        "width": width,
        "values": values,
        "device": name,
        "driver": in_proc("driver/nvidia/version", r"Module\s+([\d.]+)"),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,  # its package has several names
        "tf32": torch.backends.cuda.matmul.fp32_precision,
        "sources": sha256("".join(path.read_text() for path in sources)),
    }


def _difference(
    kind: Kind,
    spec: AttentionSpec,
    dtype: torch.dtype,
    width: int,
    values: int,
    device: torch.device,
) -> str:
    """What of a small case differs from ``dense``, in words; empty for nothing."""
    draw = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")

    inputs = {
        "q": normal(2, _HEADS, _QUERIES, width).to(dtype),
        "k": normal(2, _KV_HEADS, _KEYS, width).to(dtype),
        "v": normal(2, _KV_HEADS, _KEYS, values).to(dtype),
    }
    if spec.decay != "none":
        inputs["log_decay"] = -0.1 * normal(2, _KV_HEADS, _KEYS).abs()
    if spec.learned_coefficients:
        inputs["coefficients"] = normal(_HEADS, 1 + (spec.order or 0)).exp()
    upstream = normal(2, _HEADS, _QUERIES, values + 1)
    hidden = torch.zeros(2, 1, 1, _KEYS, dtype=torch.bool, device="cpu")
    hidden[1, ..., :9] = hidden[0, ..., -5:] = True
    compute: Callable[..., RowSums] = triton
    if kind == "chunks":
        compute = functools.partial(chunked, chunk=64, engine="triton")
    maps = kind == "pairs"
    for mask, causal in ((None, True), ((~hidden).to(device), spec.positional)):
        with torch.inference_mode(False), torch.enable_grad():
            given: dict[str, Any] = {"spec": spec, "causal": causal, "mask": mask}
            exact = _results(dense, inputs, upstream, torch.float64, device, **given)
            unit = exact.pop("unit")
            found = _results(compute, inputs, upstream, dtype, device, unit, maps, **given)
        for name, expected in exact.items():
            error = _error(found[name], expected)
            if not error <= _TOLERANCE[dtype]:
                return f"its {name} has a relative error of {error:.1e}"
    return ""


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a row, by its size and that of the others."""
    sizes = expected.norm(dim=-1)
    typical = sizes.square().mean().sqrt()
    errors = (found - expected).norm(dim=-1) / (sizes + typical).clamp(min=1e-30)
    return float(errors.nan_to_num(nan=math.inf).max())


def _results(
    compute: Callable[..., RowSums],
    inputs: dict[str, Tensor],
    upstream: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    unit: Tensor | None = None,
    maps: bool = False,
    *,
    spec: AttentionSpec,
    causal: bool,
    mask: Tensor | None,
) -> dict[str, Tensor]:
    """The sums, and the gradient of every input by its name.

    Sums are in units of each row's weight sum, as in the quotient that they become.
    """
    given = {}
    for name, x in inputs.items():
        given[name] = x.to(device, dtype if name in "qkv" else torch.float64, copy=True)
        given[name].requires_grad_()
    mapped = dict(given)
    if not maps:
        mapped |= {name: FEATURE_MAPS[spec.feature_map](given[name]) for name in "qk"}
    rows = compute(**mapped, spec=spec, causal=causal, mask=mask)
    scale = torch.zeros_like(rows.numerator[..., 0]) if rows.log_scale is None else rows.log_scale
    scale = scale.detach().double().exp()
    if unit is None:
        assert rows.weight_sum is not None
        unit = (rows.weight_sum.detach().double() * scale).abs().clamp(min=1e-30)
    parts = [rows.numerator.double()]
    if spec.row_sum is not None:
        assert rows.weight_sum is not None
        parts.append(rows.weight_sum.double().unsqueeze(-1))
    sums = torch.cat(parts, -1) * (scale / unit).unsqueeze(-1)
    upstream = upstream[..., : sums.shape[-1]].to(device)
    grads = torch.autograd.grad(sums, list(given.values()), upstream)
    named = {f"gradient of {name}": x.double() for name, x in zip(given, grads, strict=True)}
    return {"sums": sums.detach(), "unit": unit, **named}
