"""The fused and the Triton form on a GPU, at sizes of many tiles, against dense in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close, make_case
from softmax_rnn.ops.spec import AttentionSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
LONG = Shape(batch=2, heads=4, kv_heads=2, queries=1000, keys=1100, width=64, value_width=64)
# On SDPA itself, and on the sums of the flash kernels.
EXPONENTIALS = {
    "softmax": sr.variant("softmax"),
    "norm": sr.variant("norm"),
    "plus_one": sr.variant("softmax_plus_one"),
    "detached": AttentionSpec(denominator="detached_sum"),
    "rms": AttentionSpec(denominator="none", norm="rms"),
}


def on_gpu(case: Case, dtype: torch.dtype) -> Case:
    """Its inputs as the type holds them, on the GPU."""
    tensors = {name: x.to(dtype).double().cuda() for name, x in case.tensors.items()}
    mask = None if case.mask is None else case.mask.cuda()
    upstream = case.upstream.to(dtype).double().cuda()
    return dataclasses.replace(case, tensors=tensors, mask=mask, upstream=upstream)


def check(case: Case, dtype: torch.dtype, form: str) -> None:
    case = on_gpu(case, dtype)
    expected = case.run(sr.attention, form="dense")
    assert_close(case.run(sr.attention, dtype, form=form), expected, TOLERANCE[dtype], form)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    "name",
    ["softmax", "gate", "taylor:2", "taylor:10", "linear_elu", "taylor_relu:2", "taylor_cosine:4"],
)
def test_triton(name: str, causal: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for mask in ("none", "padding", "full"):
        check(make_case(sr.variant(name), causal=causal, mask=mask, shape=LONG), dtype, "triton")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "name", [name for name, spec in WIDENED.items() if spec.decay != "channel"]
)
def test_decays_polynomials_and_windows_of_triton(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for mask in ("none", "padding", "full"):
        for decay in (1e-2, 10.0):
            case = make_case(WIDENED[name], mask=mask, shape=LONG, decay=decay)
            check(case, dtype, "triton")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [16, 40, 128, 256])
def test_widths_of_triton(width: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    shape = dataclasses.replace(
        LONG, batch=1, queries=300, keys=300, width=width, value_width=width
    )
    for spec in (
        AttentionSpec(),
        AttentionSpec(clamp=0.5, denominator="none"),
        AttentionSpec(feature_map="cosine"),
        AttentionSpec(feature_map="elu1", series="power", order=1),
    ):
        check(make_case(spec, shape=shape), dtype, "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_fused(name: str, causal: bool, dtype: torch.dtype) -> None:
    narrow = dataclasses.replace(LONG, width=20, value_width=12)
    token = dataclasses.replace(LONG, queries=1)
    for shape in (LONG, narrow, token):
        check(make_case(EXPONENTIALS[name], causal=causal, shape=shape), dtype, "fused")


@pytest.mark.parametrize("form", ["fused", "triton"])
def test_the_same_bits_every_time(form: str) -> None:
    if form == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    case = on_gpu(make_case(EXPONENTIALS["detached"], shape=LONG), torch.bfloat16)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (case.run(sr.attention, torch.bfloat16, form=form) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["gate", "softmax_plus_one"])
def test_memory_is_linear(name: str) -> None:
    """No tensor of either pass grows with the square of the length."""
    peaks = {}
    for length in (4096, 16384):
        shape = Shape(batch=1, heads=2, kv_heads=2, queries=length, keys=length, width=64)
        case = on_gpu(make_case(sr.variant(name), shape=shape), torch.bfloat16)
        case.run(sr.attention, torch.bfloat16)  # tiles are chosen
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run(sr.attention, torch.bfloat16)
        peaks[length] = torch.cuda.max_memory_allocated() - before
    assert peaks[16384] <= 4.5 * peaks[4096]
