"""The triton form: what it takes, keeps, refuses and leaves alone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_cases import (
    BOUNDED,
    COMPUTED,
    KERNELS,
    SHIFTED,
    SMALL,
    check,
    forget_the_kernels,
    python,
)

import softmax_rnn as sr
from cases import LAYOUTS, WIDENED, Shape, assert_close, make_case
from softmax_rnn.ops.forms.gpu import pairs as form
from softmax_rnn.ops.forms.pairs.dense import dense
from softmax_rnn.ops.spec import AttentionSpec

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=2, heads=4, kv_heads=2, queries=5, keys=7, width=24, value_width=40),
        Shape(batch=1, heads=1, kv_heads=1, queries=1, keys=33, width=16, value_width=16),
        Shape(batch=1, heads=1, kv_heads=1, queries=1, keys=1, width=1, value_width=1),
        Shape(batch=1, heads=1, kv_heads=1, queries=64, keys=64, width=17, value_width=2),
        Shape(batch=1, heads=1, kv_heads=1, queries=16, keys=80, width=128, value_width=256),
    ],
    ids=["widths", "decode", "tiny", "whole_tiles", "wide"],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_shapes(shape: Shape, causal: bool, device: str) -> None:
    spec = SHIFTED if causal == (shape.heads == 1) else BOUNDED
    check(make_case(spec, causal=causal, shape=shape), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    case = make_case(SHIFTED, shape=Shape(batch=1, queries=20, keys=20))
    layouts = dict.fromkeys(["q", "k", "v", "upstream"], layout)
    check(dataclasses.replace(case, layouts=layouts), device)


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "cosine"])
def test_features_are_not_kept_for_the_backward(feature_map: str, device: str) -> None:
    q, k, v = (torch.randn(1, 2, 20, n, device=device, requires_grad=True) for n in (8, 8, 6))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        sr.attention(q, k, v, AttentionSpec(feature_map=feature_map), form="triton")
    assert {x.data_ptr() for x in kept if x.shape[-1] == 8} == {q.data_ptr(), k.data_ptr()}


def test_more_queries_than_keys(device: str) -> None:
    shape = dataclasses.replace(SMALL, queries=50, keys=9)
    check(make_case(BOUNDED, causal=False, shape=shape), device)


def test_gradients_that_no_one_asks_for(device: str) -> None:
    """Decays and coefficients that are constants."""
    case = make_case(COMPUTED["learned_polynomial_token"], shape=SMALL)
    there = {name: x.to(device) for name, x in case.tensors.items()}
    there["q"].requires_grad_()
    grads = [
        torch.autograd.grad(sr.attention(spec=case.spec, form=way, **there).sum(), there["q"])[0]
        for way in ("triton", "dense")
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sums", ["numerator", "weight_sum"])
@pytest.mark.parametrize("spec", [SHIFTED, BOUNDED], ids=["shifted", "bounded"])
def test_gradients_of_one_sum_alone(spec: AttentionSpec, sums: str, device: str) -> None:
    case = make_case(spec, shape=SMALL)
    upstream = case.upstream if sums == "numerator" else case.upstream[..., 0]
    results = []
    for compute, place in ((form.triton, device), (dense, "cpu")):
        inputs = [case.tensors[name].to(place).requires_grad_() for name in "qkv"]
        rows = compute(*inputs, spec, causal=True, mask=None)
        found = getattr(rows, sums)
        if rows.log_scale is not None:
            scale = rows.log_scale.exp()
            found = found * (scale.unsqueeze(-1) if sums == "numerator" else scale)
        grads = torch.autograd.grad(found, inputs, upstream.to(place), materialize_grads=True)
        tensors = dict(zip("nqkv", (found.detach(), *grads), strict=True))
        results.append({name: x.cpu() for name, x in tensors.items()})
    assert_close(*results, 1e-10)


def test_a_row_that_sees_no_key(device: str) -> None:
    x = torch.randn(1, 1, 3, 16, device=device)
    hidden = torch.zeros(1, 1, 1, 3, dtype=torch.bool, device=device)
    for spec in (SHIFTED, BOUNDED):
        rows = form.triton(x, x, x, spec, causal=True, mask=hidden)
        assert all(not y.any() for y in rows if y is not None)


def test_inputs_stay_as_they_were(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 20, 8, device=device, requires_grad=True) for _ in range(3))
    before = [x.detach().clone() for x in (q, k, v)]
    sr.attention(q, k, v, "softmax", form="triton").sum().backward()
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_what_is_beyond_the_kernels_is_named(device: str) -> None:
    x, y = torch.zeros(1, 1, 4, 500, dtype=torch.float64, device=device).split((300, 200), -1)
    with pytest.raises(ValueError, match=f"cannot compute heads of width 300 on {device}"):
        sr.attention(x, x, x, "softmax", form="triton")
    with pytest.raises(ValueError, match="cannot compute float64 cosines of width 200"):
        sr.attention(y, y, y, AttentionSpec(feature_map="cosine"), form="triton")
    assert "triton" not in sr.forms("taylor:65", device)


def test_torch_compile_leaves_the_kernels_alone(device: str) -> None:
    q, k, v = (torch.randn(1, 1, 20, 8, device=device, requires_grad=True) for _ in range(3))

    def attend() -> Tensor:
        return sr.attention(q, k, v, "clamped", form="triton")

    found, expected = torch.compile(attend, backend="aot_eager")(), attend()
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (found, expected)))


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("gate", "taylor:4", "linear_elu", "norm_rms"):
        assert "triton" not in sr.forms(name)
        on_gpu = sr.forms(name, "cuda")
        assert on_gpu.index("triton") < on_gpu.index("blocked")
    assert sr.forms("gate", "cuda")[0] == "triton"
    for name, spec in WIDENED.items():
        assert ("triton" in sr.forms(spec, "cuda")) == (name in COMPUTED)
    assert sr.forms("softmax_plus_one", "cuda")[:2] == ("fused", "triton")


def test_auto_leaves_the_interpreter_to_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "triton" in sr.forms("clamped")
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    expected = sr.attention(q, q, q, "clamped", form="blocked")
    forget_the_kernels()
    assert torch.equal(sr.attention(q, q, q, "clamped"), expected)
    assert KERNELS not in sys.modules


def test_the_kernels_are_imported_when_used(tmp_path: Path) -> None:
    """And the package does without Triton, which PyTorch imports if it is there."""
    code = f"""
import sys
sys.modules["triton"] = None
import torch, softmax_rnn
x = torch.zeros(1, 1, 3, 4)
softmax_rnn.attention(x, x, x, "clamped")
print({KERNELS!r} in sys.modules)
"""
    assert python(code, tmp_path) == "False\n"
