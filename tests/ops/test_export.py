"""Programs of ``torch.export`` for any length: what they compute, and what cannot be exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softmax_rnn as sr
from softmax_rnn.ops.forms.cpu import cpp

EXAMPLE = 600  # tokens; from then on `taylor:1` of this width is in chunks
LENGTHS = (2, 31, 800)
needs_cpp = pytest.mark.skipif(bool(cpp.missing(build=True)), reason="needs g++")


class Operation(nn.Module):
    """The operation as a module."""

    def __init__(self, spec: str, **options: Any) -> None:
        super().__init__()
        self.spec, self.options = spec, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
        """As :func:`softmax_rnn.attention`."""
        options = self.options if decay is None else {**self.options, "log_decay": decay}
        return sr.attention(q, k, v, self.spec, **options)


def qkv(tokens: int, batch: int = 2, *, decay: bool = False) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, batch, 2, tokens, 4, dtype=torch.float64).unbind(0)
    return (q, k, v, -torch.rand(batch, 2, tokens, dtype=torch.float64)) if decay else (q, k, v)


def exported(module: nn.Module, *given: Tensor, dim: int = 2, least: int = 2) -> Any:
    """The program for any batch, and any length of dimension ``dim``."""
    sizes = {0: torch.export.Dim("B", max=64), dim: torch.export.Dim("T", min=least, max=4096)}
    return torch.export.export(module, given, dynamic_shapes=(sizes,) * len(given))


def operators(program: Any) -> str:
    return " ".join(str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("spec", "example", "operator"),
    [
        ("norm", 20, "aten"),  # so few that all pairs are computed at once
        pytest.param("norm", EXAMPLE, "native_sums", marks=needs_cpp),
        pytest.param("taylor:1", EXAMPLE, "chunked_sums", marks=needs_cpp),
    ],
)
def test_a_program_has_the_form_of_its_example_and_computes_every_length(
    spec: str, example: int, operator: str
) -> None:
    program = exported(Operation(spec), *qkv(example))
    assert operator in operators(program)
    run, eager = program.module(), Operation(spec)
    for batch, tokens in enumerate(LENGTHS, start=1):
        given = qkv(tokens, batch)
        torch.testing.assert_close(run(*given), eager(*given), rtol=0, atol=1e-10)


def test_both_directions_with_a_decay() -> None:
    options = {"causal": False, "form": "chunked"}
    run = exported(Operation("taylor:2+decay", **options), *qkv(20, decay=True), least=3).module()
    eager = Operation("taylor:2+decay", causal=False)
    for tokens in (3, 70):
        given = qkv(tokens, 3, decay=True)
        torch.testing.assert_close(run(*given), eager(*given), rtol=0, atol=1e-10)
    q, k, v, decay = qkv(70, decay=True)  # a program of one direction is another one
    assert (run(q, k, v, decay) - eager(q, k, v, decay.roll(1, 2))).abs().max() > 1e-6


def test_a_layer_with_a_window_and_a_series() -> None:
    layer = sr.Attention(8, 2, "window_state:8").double()
    run = exported(layer, torch.randn(2, 40, 8, dtype=torch.float64), dim=1).module()
    other = sr.Attention(8, 2, "window_state:7").double()  # its boundary is a token elsewhere
    other.load_state_dict(layer.state_dict())
    for tokens in LENGTHS:
        x = torch.randn(1, tokens, 8, dtype=torch.float64)
        torch.testing.assert_close(run(x), layer(x), rtol=0, atol=1e-10)
    assert (run(x) - other(x)).abs().max() > 1e-6


def test_what_cannot_be_exported_names_the_forms_that_can() -> None:
    with pytest.raises(ValueError, match=r"'blocked' cannot compute.*several lengths.*dense\."):
        exported(Operation("taylor:1", form="blocked"), *qkv(40))
    with pytest.raises(ValueError, match="no finite state"):
        exported(Operation("softmax", form="chunked"), *qkv(40))
    run = torch.export.export(Operation("taylor:1", form="blocked"), qkv(40)).module()
    given = qkv(40)  # of one length it can
    torch.testing.assert_close(run(*given), Operation("taylor:1")(*given), rtol=0, atol=1e-10)


def test_a_program_in_chunks_refuses_derivatives() -> None:
    run = exported(Operation("taylor:1", form="chunked"), *qkv(40)).module()
    q, k, v = qkv(40)
    with pytest.raises(RuntimeError, match="no derivatives"):
        run(q.requires_grad_(), k, v).sum().backward()
