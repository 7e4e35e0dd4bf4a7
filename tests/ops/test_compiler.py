"""The marks for the compiler do what torch's own do, without importing it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from softmax_rnn.ops.compiler import constant_when_compiled, uncompiled

calls: list[int] = []


@uncompiled
def loop(x: Tensor, *, times: int) -> Tensor:
    calls.append(times)
    for _ in range(times):
        x = x.sin()
    return x


def test_uncompiled_is_called_as_it_is() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: loop(x + 1, times=3) + 2, backend=backend)
    x = torch.rand(3)
    expected = (x + 1).sin().sin().sin() + 2
    torch.testing.assert_close(compiled(x), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(x), expected)
    assert calls == [3, 3]
    assert not any("sin" in graph.code for graph in graphs)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: loop(x, times=1), backend=backend, fullgraph=True)(x)


def test_constant_is_torchs_own_mark() -> None:
    ours, torchs = (
        mark(lambda: 1) for mark in (constant_when_compiled, torch.compiler.assume_constant_result)
    )
    assert vars(ours) == vars(torchs)
