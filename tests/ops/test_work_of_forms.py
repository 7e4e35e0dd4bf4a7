"""The rule between pairs and chunks, and the length of chunks; benchmarks check the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import softmax_rnn as sr
from softmax_rnn.ops.forms.cpu.cpp import VARIABLE
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.plan import planned
from softmax_rnn.ops.variants import resolve
from softmax_rnn.ops.work import Sizes, chunk_length, chunks_pay

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = [
    *(("choice-cpu-xeon.json", "rows"), ("choice-cpu-epyc.json", "rows")),
    ("recurrence-cpu-epyc.json", "dispatch"),
]


def square(spec: sr.AttentionSpec, length: int, width: int) -> Sizes:
    return Sizes(spec, length, length, width, width)


@pytest.mark.parametrize(("file", "rows"), MEASURED)
def test_the_rule_fits_what_was_measured(file: str, rows: str) -> None:
    """In C++ and in PyTorch's operations."""
    every: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())[rows]
    cells = [cell for cell in every if "order" in cell or cell["length"] > 256]
    assert len(cells) >= 36
    for cell in cells:
        times = {name: x["median"] for name, x in cell["seconds"].items() if name != "auto"}
        spec = sr.variant(cell["spec"] if "spec" in cell else f"taylor:{cell['order']}")
        chunks = chunks_pay(square(spec, cell["length"], cell["width"]))
        taken = [x for name, x in times.items() if (name == "chunked") == chunks]
        assert taken, f"{cell}: not timed, as it takes long"
        assert taken[0] <= 1.15 * min(times.values()), cell


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [8, 16, 64])
def test_chunks_pay_from_the_crossover_on(width: int, order: int) -> None:
    spec = sr.variant("taylor", order=order)
    length = sr.crossover(spec, width, width)
    lengths = (length - 1, length, 2 * length, 1000 * length)
    found = [chunks_pay(square(spec, each, width)) for each in lengths]
    assert found == [False, True, True, True]


def test_few_tokens_on_a_gpu_are_pairs() -> None:
    """There the steps of chunks, one launch after the other, take longer."""
    sizes = square(sr.variant("taylor:1"), 800, 16)
    assert chunks_pay(sizes)
    assert not chunks_pay(sizes, "cuda")
    assert chunks_pay(square(sr.variant("taylor:1"), 1024, 16), "cuda")


def test_what_is_not_square() -> None:
    spec = sr.variant("taylor:2")
    assert not chunks_pay(Sizes(spec, 1, 2**20, 16, 16))  # a state would be built for one query
    assert chunks_pay(Sizes(spec, 4096, 4096, 16, 16))
    assert not chunks_pay(Sizes(spec, 4096, 4096, 64, 64))
    assert chunks_pay(Sizes(spec, 4096, 4096, 64, 64, causal=False))  # twice as many pairs
    assert chunks_pay(Sizes(spec, 4096, 4096, 64, 64, group=8))  # one state for eight heads
    assert not chunks_pay(Sizes(spec, 4096, 4096, 64, 640))


def test_the_length_of_chunks() -> None:
    spec = sr.variant("taylor:2")
    assert chunk_length(square(spec, 2**16, 8)) == 64
    lengths = [chunk_length(square(spec, 2**16, width)) for width in (8, 16, 32, 64, 128)]
    assert lengths == sorted(lengths)  # a larger state is written less often
    assert chunk_length(square(spec, 200, 64)) == 256  # one chunk
    # Even the monomials of one head are many.
    assert chunk_length(square(sr.variant("taylor:4"), 2**16, 64)) == 64


def test_auto_follows_the_rule_and_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")

    def chosen(length: int, mask: torch.Tensor | None = None, name: str = "taylor:2") -> str:
        x = torch.zeros(1, 2, length, 16)
        return planned(Call(x, x, x, resolve(name), mask=mask)).name

    crossover = sr.crossover("taylor:2", 16, 16)
    assert chosen(crossover - 1) == "blocked"
    assert chosen(crossover) == "chunked"
    assert chosen(crossover, torch.ones(1, 1, 1, crossover, dtype=torch.bool)) == "chunked"
    whole = torch.ones(1, 1, crossover, crossover, dtype=torch.bool)
    assert chosen(crossover, whole) == "blocked"
    assert chosen(crossover, name="softmax") == "fused"


def test_exp_has_no_crossover() -> None:
    with pytest.raises(ValueError, match="no finite state"):
        sr.crossover("softmax", 64, 64)
