"""The fused form on a GPU, as far as a CPU can tell: its kernels' kin stand in for them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import softmax_rnn as sr
from cases import Shape, assert_close, make_case
from softmax_rnn.ops import plan
from softmax_rnn.ops.forms.pairs import fused
from softmax_rnn.ops.forms.pairs.dense import dense
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.spec import AttentionSpec

aten = torch.ops.aten
SEED, OFFSET = torch.tensor(1), torch.tensor(2)


def arguments(operator: str, given: tuple[Any, ...], named: dict[str, Any]) -> SimpleNamespace:
    """What an operator was called with, by the names of its schema."""
    parameters = getattr(aten, operator).default._schema.arguments
    values = {p.name: p.default_value for p in parameters if p.has_default_value()}
    values |= {p.name: value for p, value in zip(parameters, given, strict=False)}
    values |= named
    assert values.keys() == {p.name for p in parameters}
    return SimpleNamespace(**values)


def triangle(a: SimpleNamespace) -> Tensor | None:
    """The causal mask as the flash kernel of a GPU has it: aligned to the last keys."""
    if not a.is_causal:
        return None
    queries, keys = a.query.shape[2], a.key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return torch.zeros(queries, keys, dtype=a.query.dtype).masked_fill(~seen, -torch.inf)


def forward(*given: Any, **named: Any) -> tuple[Any, ...]:
    a = arguments("_scaled_dot_product_flash_attention", given, named)
    assert a.dropout_p == 0
    assert not a.return_debug_mask
    assert a.query.shape[-1] == a.key.shape[-1] == a.value.shape[-1]
    assert a.query.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (a.query, a.key, a.value))
    kin = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kin(a.query, a.key, a.value, attn_mask=triangle(a), scale=a.scale)
    return out, lse, None, None, a.query.shape[2], a.key.shape[2], SEED, OFFSET, None


def backward(*given: Any, **named: Any) -> tuple[Tensor, ...]:
    a = arguments("_scaled_dot_product_flash_attention_backward", given, named)
    assert a.dropout_p == 0
    assert a.cum_seq_q is a.cum_seq_k is None
    assert (a.max_q, a.max_k) == (a.query.shape[2], a.key.shape[2])
    assert (a.philox_seed, a.philox_offset) == (SEED, OFFSET)
    kin = aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (a.grad_out, a.query, a.key, a.value, a.out, a.logsumexp)
    return kin(*inputs, 0.0, False, attn_mask=triangle(a), scale=a.scale)


@pytest.fixture
def kin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that say they are on a GPU, and the kernels that they then find."""
    kernels = SimpleNamespace(
        _scaled_dot_product_flash_attention=forward,
        _scaled_dot_product_flash_attention_backward=backward,
    )
    monkeypatch.setattr(fused, "_aten", kernels)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


@pytest.mark.usefixtures("kin")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("sums", ["numerator", "both"])
@pytest.mark.parametrize(
    "shape",
    [Shape(width=20, value_width=12), Shape(queries=1), Shape(width=16, value_width=16)],
    ids=["widths", "decode", "aligned"],
)
def test_the_sums_of_a_gpu(shape: Shape, sums: str, causal: bool) -> None:
    spec = AttentionSpec(denominator="sum_plus_one")
    case = make_case(spec, causal=causal, shape=shape)
    found, expected = ({}, {})
    for form, result in ((fused.fused, found), (dense, expected)):
        q, k, v = (case.tensors[name].clone().requires_grad_() for name in "qkv")
        # Not row by row, as the kernels want it.
        q_apart = q.transpose(-1, -2).contiguous().transpose(-1, -2)
        rows = form(q_apart, k, v, spec, causal=causal, mask=None)
        scale = 1.0 if rows.log_scale is None else rows.log_scale.exp()
        result["numerator"] = rows.numerator * torch.as_tensor(scale).unsqueeze(-1)
        loss = (result["numerator"] * case.upstream).sum()
        if sums == "both":
            result["weight_sum"] = rows.weight_sum * scale
            loss = loss + (result["weight_sum"] * case.upstream[..., 0]).sum()
        result |= {name: x.detach() for name, x in result.items()}
        result |= dict(zip("qkv", torch.autograd.grad(loss, (q, k, v)), strict=True))
    assert_close(found, expected, 1e-10)


def test_the_operators_take_what_they_are_given() -> None:
    """The real ones, on tensors without data."""
    q, k, v = (
        torch.empty(2, heads, length, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads, length in ((4, 5), (2, 9), (2, 9))
    )
    out, weight_sum, lse = fused._FlashSums.apply(q, k, v, None, True, 0.25, True)
    assert out.shape == q.shape
    assert weight_sum.shape == lse.shape == (2, 4, 5)
    grads = torch.autograd.grad(out.sum() + weight_sum.sum(), (q, k, v))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize(
    ("dtype", "width", "masked", "reason"),
    [
        (torch.bfloat16, 64, False, ""),
        (torch.float16, 256, False, ""),
        (torch.float32, 64, False, "torch.float32 inputs"),
        (torch.bfloat16, 64, True, "a mask"),
        (torch.float16, 264, False, "heads of width 264"),
    ],
)
def test_what_the_kernels_of_a_gpu_refuse(
    dtype: torch.dtype, width: int, masked: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Auto says once that it takes another form; who asks for this one is told why not."""
    monkeypatch.setattr(fused, "has_flash", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    plan._warn_once.cache_clear()
    detached = AttentionSpec(denominator="detached_sum")

    def chosen(spec: AttentionSpec, form: str) -> str:
        with FakeTensorMode():
            x = torch.empty(1, 2, 8, width, device="cuda", dtype=dtype)
            mask = torch.ones(1, 1, 1, 8, dtype=torch.bool, device="cuda") if masked else None
        return plan.planned(Call(x, x, x, spec, mask=mask), form, part=True).name

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            form = chosen(detached, "auto")
    if reason:
        assert form != "fused"
        assert [str(w.message) for w in caught] == [
            f"PyTorch's fused kernels cannot compute {reason}: {form!r} is used."
        ]
        with pytest.raises(ValueError, match=f"cannot compute {reason} on cuda; forms that can"):
            chosen(detached, "fused")
    else:
        assert (form, caught) == ("fused", [])
    assert chosen(sr.variant("norm"), "auto") == "fused"  # SDPA's matter
