"""The chunked form's loops as Triton kernels: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import Shape, assert_close, make_case
from softmax_rnn.ops import plan
from softmax_rnn.ops.decay import per_key_decay
from softmax_rnn.ops.forms.chunks.chunked import chunked
from softmax_rnn.ops.forms.gpu import chunks as triton_chunks
from softmax_rnn.ops.forms.gpu.layout import layout
from softmax_rnn.ops.forms.pairs.dense import dense
from softmax_rnn.ops.forms.row_sums import RowSums
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.monomials import state_rows
from softmax_rnn.ops.signature import signature
from softmax_rnn.ops.spec import AttentionSpec

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
TAYLOR = AttentionSpec(series="taylor", order=2)
SPECS = {
    "taylor 2": TAYLOR,
    "taylor 1": AttentionSpec(series="taylor", order=1, denominator="sum_plus_one"),
    "power 2": AttentionSpec(series="power", order=2, denominator="none"),
    "power 1": AttentionSpec(series="power", order=1, scale=-0.6),
    "signed": AttentionSpec(series="polynomial", coefficients=(0.3, -0.5, 0.2)),
    "constant and 1": AttentionSpec(series="polynomial", coefficients=(0.3, -0.5)),
    "head": AttentionSpec(series="power", order=1, decay="head", denominator="none"),
    "token": AttentionSpec(series="taylor", order=2, decay="token"),
    "square token": AttentionSpec(series="power", order=2, decay="token"),
}
ODD = Shape(batch=1, heads=2, kv_heads=1, queries=70, keys=75, width=16, value_width=16)


def rows(
    tensors: dict[str, Tensor], spec: AttentionSpec, dtype: torch.dtype, form: Any, **options: Any
) -> dict[str, Tensor]:
    """Sums and state, and the gradient of everything by its name."""
    kept = {name: x.to(dtype) for name, x in tensors.items() if name in ("q", "k", "v")}
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if "state" in tensors:
        kept["state"] = tensors["state"].to(wide)
    given = kept.copy()
    if "log_decay" in tensors:
        kept["log_decay"] = tensors["log_decay"]
    for x in kept.values():
        x.requires_grad_()
    log_decay = per_key_decay(kept.get("log_decay"), kept["k"], options["mask"])
    found: RowSums = form(**given, spec=spec, log_decay=log_decay, **options)
    names = ["numerator"] + ["weight_sum"] * bool(spec.row_sum) + ["state"] * ("state" in tensors)
    outputs: dict[str, Tensor] = {name: getattr(found, name) for name in names}
    draw = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in outputs.values()]
    upstream = [x.to(y) for x, y in zip(upstream, outputs.values(), strict=True)]
    grads = torch.autograd.grad(list(outputs.values()), list(kept.values()), upstream)
    found_grads = {f"d{name}": x for name, x in zip(kept, grads, strict=True)}
    return {name: x.detach().cpu().double() for name, x in (outputs | found_grads).items()}


def check(
    name: str,
    device: str,
    dtype: torch.dtype = torch.float64,
    *,
    shape: Shape = ODD,
    causal: bool = True,
    mask: str = "none",
    state: bool = False,
    chunk: int = 64,
    decay: float = 0.1,
) -> None:
    """Of inputs that the type holds exactly, against dense, or with a state PyTorch's own loops."""
    if device == "cuda" and dtype == torch.float64:
        dtype = torch.float32
    spec = SPECS[name]
    case = make_case(spec, causal=causal, mask=mask, shape=shape, decay=decay)
    tensors = {key: x.to(dtype).double() for key, x in case.tensors.items() if key in "qkv"}
    if "log_decay" in case.tensors:
        tensors["log_decay"] = case.tensors["log_decay"]
    options: dict[str, Any] = {"causal": causal, "mask": case.mask}
    there = {key: x.to(device) for key, x in tensors.items()}
    mine = {"chunk": chunk, "engine": "triton"}
    reference: Any = dense
    if state:
        channels = shape.value_width + int(spec.row_sum is not None)
        size = shape.batch, shape.kv_heads, channels, state_rows(spec, shape.width)
        draw = torch.Generator().manual_seed(2)
        tensors["state"] = torch.randn(size, generator=draw).double()
        there["state"] = tensors["state"].to(device)
        options["keep_state"], reference = True, chunked
    theirs = {"engine": "torch", "chunk": 48} if state else {}
    expected = rows(tensors, spec, torch.float64, reference, **options, **theirs)
    if case.mask is not None:
        options["mask"] = case.mask.to(device)
    call = Call(*(there[name].to(dtype) for name in "qkv"), spec)
    assert not plan.triton_chunks_refuse(signature(call), chunk)
    found = rows(there, spec, dtype, chunked, **options, **mine)
    assert_close(found, expected, TOLERANCE[dtype], f"{name} {dtype}")


@pytest.mark.parametrize("name", SPECS)
def test_series_and_decays(name: str, device: str) -> None:
    """After a few earlier keys; two chunks, of which the second one is short."""
    check(name, device)


@pytest.mark.parametrize("name", ["taylor 2", "power 1", "square token"])
def test_states(name: str, device: str) -> None:
    """A state before the first key, and that after the last one."""
    check(name, device, state=True)


@pytest.mark.parametrize(("name", "state"), [("taylor 2", False), ("constant and 1", True)])
def test_every_key(name: str, state: bool, device: str) -> None:
    check(name, device, causal=False, mask="padding", state=state)


@pytest.mark.parametrize(
    ("queries", "keys", "chunk"), [(3, 3, 64), (1, 9, 64), (129, 129, 128), (64, 192, 64)]
)
def test_lengths(queries: int, keys: int, chunk: int, device: str) -> None:
    """Less than a chunk; one token after others; a chunk of two tiles; whole chunks."""
    shape = Shape(1, 1, 1, queries, keys, 16, 16)
    for name in ("power 1", "token"):
        check(name, device, shape=shape, chunk=chunk, mask="padding")


def test_widths_that_are_no_power_of_2(device: str) -> None:
    shape = Shape(1, 1, 1, 66, 66, width=48, value_width=32)
    check("constant and 1", device, shape=shape)
    check("taylor 2", device, shape=Shape(1, 1, 1, 66, 66, width=32, value_width=48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype, device: str) -> None:
    check("token", device, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("decay", [1e-3, 5.0])
def test_weak_and_strong_decays(decay: float, dtype: torch.dtype, device: str) -> None:
    """The gradient of log decays too: a query's own key is the largest part of its sum."""
    check("head", device, dtype, decay=decay, shape=Shape(1, 2, 1, 200, 203, 16, 16))


def test_heads_that_do_not_fit_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_chunks, "_ELEMENTS", 1)
    check("constant and 1", device, shape=Shape(2, 2, 2, 70, 75, 16, 16), state=True)


def test_a_weight_sum_of_half_precision_is_not_rounded(device: str) -> None:
    """Nor are the queries that an odd factor scales."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 70, 16, generator=draw).bfloat16().to(device) for _ in range(3))
    spec = AttentionSpec(series="power", order=1, scale=0.3)
    options = {"causal": False, "mask": None}
    found = chunked(q, k, v, spec, **options, chunk=64, engine="triton")
    expected = dense(*(x.double().cpu() for x in (q, k, v)), spec, **options)
    assert found.weight_sum is not None
    assert found.noise is not None
    error = (found.weight_sum.cpu() - expected.weight_sum).abs()
    assert (error <= found.noise.cpu()).all()
    size = 0.3 * (q.float() * k.float().abs().sum(2, keepdim=True)).norm(dim=3)
    size = size * 2**0.5  # the keys are added in two chunks
    torch.testing.assert_close(found.noise, 4 * torch.finfo(torch.float32).eps * size)


@pytest.mark.parametrize("spec", [TAYLOR, SPECS["power 2"], SPECS["constant and 1"]])
def test_states_change_their_order_and_back(spec: AttentionSpec) -> None:
    rows = layout(spec, 32, 1.0, torch.float64, torch.device("cpu"))
    state = torch.randn(3, state_rows(spec, 32), dtype=torch.float64)
    assert torch.equal(rows.to_library(rows.from_library(state)), state)
    counted = (rows.from_library(state).square() * rows.counts).sum(-1)
    torch.testing.assert_close(counted, (state.square() * rows.multiplicities).sum(-1))


def test_what_stays_with_other_loops(device: str) -> None:
    def suits(spec: AttentionSpec, width: int = 16, values: int = 16, chunk: int = 64) -> bool:
        q, v = (torch.zeros(1, 1, 70, size, device=device) for size in (width, values))
        return not plan.triton_chunks_refuse(signature(Call(q, q, v, spec)), chunk)

    assert suits(TAYLOR)
    assert suits(TAYLOR, 128, 128)
    assert not suits(TAYLOR, 24)
    assert not suits(TAYLOR, 16, 144)
    assert not suits(TAYLOR, chunk=16)
    for spec in (
        AttentionSpec(series="taylor", order=0, denominator="length"),
        AttentionSpec(series="taylor", order=3),
        AttentionSpec(series="polynomial", order=2),
        AttentionSpec(series="power", order=1, decay="channel"),
    ):
        assert not suits(spec)


def test_the_interpreter_is_for_tests(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("there Triton is the default")
    monkeypatch.setattr(triton_chunks, "sums", None)
    x = torch.randn(1, 1, 70, 16)
    assert sr.attention(x, x, x, TAYLOR, form="chunked").isfinite().all()


@pytest.mark.slow
def test_the_kernels_compile(tmp_path: Path) -> None:
    """Within registers and shared memory; benchmarks/kernels.py compiles all of them."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(sr.__file__).parents[1]), "."])
    command = [sys.executable, "-m", "benchmarks.kernels", "--capability", "90", "--width", "128"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*command, "--dtype", "bfloat16"],
        **{"capture_output": True, "text": True, "env": environment, "cwd": root},
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert len({row[0] for row in table}) == 5
    for *_, registers, _spilled, shared in table:
        assert int(registers) <= 255
        assert int(shared) <= 227
