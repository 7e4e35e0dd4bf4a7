"""The chunked form's loops in C++ against its loops of PyTorch operations."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops import plan
from softmax_rnn.ops.forms.chunks.chunked import chunked
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.monomials import state_rows
from softmax_rnn.ops.signature import signature

pytestmark = pytest.mark.skipif(
    bool(cpp.missing()), reason="needs g++ and SOFTMAX_RNN_CPU_KERNEL other than 0"
)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}
SPECS = {
    **{name: sr.variant(name) for name in ("linear_elu", "taylor:2", "taylor:3", "power:3")},
    "signed": sr.AttentionSpec(series="polynomial", coefficients=(0.3, -0.5, 0.0, 0.2)),
    "constant": sr.AttentionSpec(series="taylor", order=0),
    "no sum": sr.AttentionSpec(series="taylor", order=2, denominator="length"),
}


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "LEAST_TOKENS", 1)


def results(
    inputs: dict[str, Tensor | None], spec: sr.AttentionSpec, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Sums and state, then the gradient of every input."""
    given = {name: x if x is None else x.to(dtype) for name, x in inputs.items()}
    given["log_decay"] = inputs["log_decay"]
    wanted = [x.requires_grad_() for x in given.values() if x is not None]
    sums = chunked(**given, spec=spec, mask=None, **options)
    outputs = [x for x in (sums.numerator, sums.weight_sum, sums.state) if x is not None]
    draw = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in outputs]
    grads = torch.autograd.grad(outputs, wanted, upstream)
    return [x.detach() for x in (*outputs, *grads)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SPECS)
def test_both_loops_agree(name: str, dtype: torch.dtype) -> None:
    """Chunks that do not divide the length, earlier keys, states, decays, groups, layouts."""
    pick, draw = random.Random(name), torch.Generator().manual_seed(0)
    for _ in range(12):
        batch, heads, groups = pick.choice([1, 2]), pick.choice([1, 3]), pick.choice([1, 2])
        queries, earlier = pick.choice([1, 33, 100]), pick.choice([0, 0, 40])
        width, chunk, decays = pick.choice([1, 5, 16]), pick.choice([16, 48]), pick.random() < 0.5
        causal = decays or pick.random() < 0.8
        spec = dataclasses.replace(SPECS[name], decay="token" if decays else "none")
        keys, channels = queries + earlier, 7 + int(spec.row_sum is not None)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        inputs: dict[str, Tensor | None] = {
            "q": normal(batch, queries, heads * groups, width).transpose(1, 2),
            "k": normal(batch, heads, keys, width),
            "v": normal(3, batch, heads, keys, 7)[1],
            "log_decay": -normal(batch, heads, keys).square() if decays else None,
            "state": None,
        }
        if pick.random() < 0.5:
            inputs["state"] = normal(batch, heads, channels, state_rows(spec, width))
        options = {"causal": causal, "keep_state": pick.random() < 0.5, "chunk": chunk}
        of_call = signature(Call(inputs["q"], inputs["k"], inputs["v"], spec, causal))
        single = of_call.causal and keys == 1
        assert plan.loops(of_call, chunk) == ("torch" if single else "native")
        found = results(inputs, spec, dtype, **options, engine="native")
        expected = results(inputs, spec, dtype, **options, engine="torch")
        for a, b in zip(found, expected, strict=True):
            error = (a - b).double().norm() / b.double().norm().clamp(min=1.0)
            assert error <= TOLERANCE[dtype], (spec, options, a.shape)
