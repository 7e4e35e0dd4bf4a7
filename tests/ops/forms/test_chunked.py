"""The chunked form in short chunks, and as a part of a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_states import in_pieces
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close, make_case
from softmax_rnn.ops.forms.chunks.loops import TorchChunks
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.cpu.cpp import VARIABLE
from softmax_rnn.ops.monomials import state_rows

CHUNK = 16
SPECS = {
    "taylor": sr.variant("taylor", order=2),
    "odd": sr.AttentionSpec(series="taylor", order=3, floor=0.5),
    "power": sr.variant("quadratic"),
    "constant": sr.AttentionSpec(series="taylor", order=0, denominator="length"),
    "token": WIDENED["learned_polynomial_token"],
    "channel": WIDENED["learned_polynomial_channel"],
}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softmax_rnn.ops.work._LENGTHS", (CHUNK,))


def case_of(name: str, queries: int, keys: int, *, causal: bool = True, width: int = 3) -> Case:
    shape = Shape(queries=queries, keys=keys, width=width)
    return make_case(SPECS[name], causal=causal, mask="padding", shape=shape)


def check(case: Case, attend: Callable[..., Tensor] = sr.attention) -> None:
    expected = case.run(sr.attention, form="dense")
    assert_close(case.run(attend, form="chunked"), expected, 1e-10, str(case.spec))


@pytest.mark.parametrize("name", ["odd", "power", "constant", "token", "channel"])
def test_short_chunks(name: str) -> None:
    """Grouped queries, a shorter last chunk, keys before the queries, states between pieces."""
    check(case_of(name, 53, 53))
    check(case_of(name, 37, 70))
    if not SPECS[name].positional:
        check(case_of(name, 35, 50, causal=False))
    case = case_of(name, 93, 93)
    pieces = in_pieces(case, [17, 40], "chunked", torch.float64)
    assert_close(pieces, case.run(sr.attention, form="dense"), 1e-10, name)


def test_a_compiled_model_is_one_graph() -> None:
    """With gradients and a mask, and with a state in and out; compiled once."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *given: Any, mask: Tensor, **named: Any) -> Tensor:
        """Two pieces and the state between them."""
        outs, state = [], None
        for here in (slice(0, 23), slice(23, None)):
            piece = (x[:, :, here] for x in (q, k, v))
            named.update(mask=mask[..., here], state=state, return_state=True)
            out, state = sr.attention(*piece, *given, **named)
            outs.append(out)
        return torch.cat(outs, dim=2)

    for function in (sr.attention, attend):
        graph = torch.compile(function, fullgraph=True, backend="aot_eager")
        for _ in range(2):  # PyTorch checks the first call of an operator, in another mode
            check(case_of("taylor", 93, 93), graph)
        with torch.compiler.set_stance("fail_on_recompile"):
            check(case_of("taylor", 93, 93), graph)


def test_auto_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softmax_rnn.ops.work._LENGTHS", (64, 128))
    monkeypatch.setattr("softmax_rnn.ops.state._SMALL", 0)  # so that it looks at the free memory
    assert sr.crossover(SPECS["taylor"], 3, 6) < 700
    case = case_of("taylor", 700, 700)
    graph = torch.compile(sr.attention, fullgraph=True, backend="aot_eager")
    assert_close(case.run(graph), case.run(sr.attention, form="dense"), 1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_the_operators_are_well_formed(causal: bool) -> None:
    """Schema, shapes without data, gradients under tracing: PyTorch's own checks."""
    q, k, v = torch.randn(2, 3, 1, 40), torch.randn(2, 3, 50), torch.randn(2, 4, 50)
    state = torch.randn(2, 4, state_rows(SPECS["taylor"], 3))
    for before in (None, state.requires_grad_()):
        inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), before)
        plan = ("taylor", 2, None, "none", causal, CHUNK, before is not None, True)
        for loops in ("torch", "native") if not cpp.missing() else ("torch",):
            arguments = (*inputs, None, None, *plan, loops, 1.0, "")
            library.opcheck(torch.ops.softmax_rnn.chunked_sums, arguments)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_the_operators_are_well_formed_with_decays_and_coefficients(decay: str) -> None:
    q, k, v = torch.randn(2, 3, 2, 40), torch.randn(2, 3, 50), torch.randn(2, 4, 50)
    state = torch.randn(2, 4, state_rows(SPECS["taylor"], 3))
    log_decay = -torch.rand(2, 3 if decay == "channel" else 1, 50, dtype=torch.float64)
    inputs = (q, k, v, state, log_decay, torch.randn(2, 2, 3))
    inputs = [x.requires_grad_() for x in inputs]
    plan = ("polynomial", 2, None, decay, True, CHUNK, True, True, "torch", 1.0, "")
    library.opcheck(torch.ops.softmax_rnn.chunked_sums, (*inputs, *plan))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token", "channel"])
def test_decays_and_coefficients_in_a_compiled_model(name: str) -> None:
    graph = torch.compile(sr.attention, fullgraph=True, backend="aot_eager")
    check(case_of(name, 53, 60), graph)


@pytest.mark.parametrize("name", ["token", "channel"])
def test_decays_and_coefficients_with_activation_checkpointing(name: str) -> None:
    def attend(*given: Any, **named: Any) -> Tensor:
        return checkpoint(sr.attention, *given, use_reentrant=False, **named)

    check(case_of(name, 53, 60), attend)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that has monomials."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.size = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, Tensor) and self.rows in x.shape:
                self.size = max(self.size, x.numel())
        return made


@pytest.mark.parametrize("causal", [True, False])
def test_features_are_of_one_chunk(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """However long the sequence, in both passes; the backward pass is left a state a chunk."""
    monkeypatch.setenv(VARIABLE, "0")  # C++ has one chunk of one head at a time
    rows = state_rows(SPECS["taylor"], 5)
    for name in ("sums", "grads"):
        inner = getattr(TorchChunks, name)

        def watched(*given: Any, inner: Any = inner) -> Any:
            with largest:
                return inner(*given)

        monkeypatch.setattr(TorchChunks, name, watched)
    for chunks in (3, 9):
        largest, kept = Largest(rows), []
        case = case_of("taylor", chunks * CHUNK, chunks * CHUNK, causal=causal, width=5)
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x.shape) or x, lambda x: x
        )
        with keep:
            case.run(sr.attention, form="chunked")
        heads, channels = 2 * 2, 6 + 1
        assert largest.size == heads * rows * (3 if causal else 2) * CHUNK  # two queries a key
        states = [shape for shape in kept if shape[-1] == rows]
        assert states == [(chunks - 1 if causal else 1, heads, channels, rows)]
