"""One sequence over 1, 2 and 4 processes: outputs and gradients equal those of one process."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close, make_case
from quick import first_quick
from softmax_rnn._utils import processes
from softmax_rnn.ops import context_parallel
from softmax_rnn.ops.context_parallel import context_parallel_attention, previous_tail

LENGTH = 24  # of the sequence
SPECS = {
    **WIDENED,
    **{name: sr.variant(name) for name in ("softmax", "gate", "norm", "linear_elu", "taylor:2")},
    **{name: sr.variant(name) for name in ("length", "norm_rms", "detached")},
    "input_gate": sr.AttentionSpec(series="taylor", order=1, input_gate=True),
    "own_key": sr.AttentionSpec(window=1),  # no key of another process
    "wide_window": sr.AttentionSpec(window=20, decay="token"),  # longer than a block
    # In many rows the near weights are zero, so that only keys of another process count.
    "strong": sr.AttentionSpec(series="power", order=2, feature_map="relu", decay="token"),
}
DECAYS = {"strong": 10.0}
# With padding=True, which may hide more keys than a window holds; their outputs mean nothing.
PADDED = {"padded": sr.AttentionSpec(window=3, decay="token")}
SPECS |= PADDED
# Of the other tensors, what has a dimension of positions, and where.
POSITIONS = {"q": 2, "k": 2, "v": 2, "input_gate": 2, "output_gate": 2, "outside_q": 2}
POSITIONS |= {"outside_k": 2, "log_decay": 2}


def case_of(name: str, masked: bool) -> Case:
    shape = Shape(2, 4, 2, LENGTH, LENGTH, 3, 2)
    mask = "none" if not masked else "gaps" if name in PADDED else "padding"
    return make_case(SPECS[name], shape=shape, mask=mask, decay=DECAYS.get(name, 0.3))


def attend(function: Any, name: str, *args: Any, mask: Tensor | None, **options: Any) -> Tensor:
    """The outputs that mean something, and 0."""
    if name not in PADDED:
        return function(*args, mask=mask, **options)
    out = function(*args, mask=mask, padding=True, **options)
    return out if mask is None else out.masked_fill(~mask.mT, 0.0)


@functools.cache
def expected_of(name: str, masked: bool) -> dict[str, Tensor]:
    return case_of(name, masked).run(functools.partial(attend, sr.attention, name), form="dense")


def part(x: Tensor, dim: int, rank: int, count: int) -> Tensor:
    return x.chunk(count, dim)[rank] if x.ndim > dim else x


def work(rank: int, count: int, path: Path) -> None:
    """All cases of one process, with those of the others."""
    torch.set_num_threads(1)
    meet = f"file://{path / 'meet'}"
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
    found: dict[Any, Any] = {}
    for number, (name, spec) in enumerate(SPECS.items()):
        # Of two processes every case; of four every second, and each form with and without a mask.
        for masked in (False, True) if count == 2 else (number % 2 == 0,):
            for form in (
                "auto",
                *(form for form in ("chunked", "dense") if form in sr.forms(spec)),
            ):
                found[name, masked, form] = one(name, masked, form, rank, count)
    found["tail"] = tail(rank)
    found["refused"] = [refused(**options) for options in REFUSED]
    found["before"] = {name: before(name, rank, count) for name in FADING}
    torch.save(found, path / f"{rank}.pt")
    distributed.destroy_process_group()


REFUSED: list[dict[str, Any]] = [
    {"spec": "softmax", "segments": torch.zeros(1, 6, dtype=torch.long)},
    {"spec": "taylor:2", "segments": torch.zeros(1, 6, dtype=torch.long)},
    {"spec": sr.AttentionSpec(window=3), "causal": False},
]


def refused(**options: Any) -> str:
    """What is said of a call: every process says it, so that none waits for another."""
    x = torch.ones(1, 2, 6, 4)
    try:
        context_parallel_attention(x, x, x, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def one(name: str, masked: bool, form: str, rank: int, count: int) -> dict[str, Tensor]:
    case = case_of(name, masked)
    tensors = {
        key: part(x, POSITIONS.get(key, 9), rank, count).clone().requires_grad_()
        for key, x in case.tensors.items()
    }
    mask = case.mask
    if mask is not None:  # a process without hidden keys need not give it
        mask = part(mask, 3, rank, count)
        mask = None if mask.all() else mask
    out = attend(context_parallel_attention, name, spec=case.spec, mask=mask, form=form, **tensors)
    grads = torch.autograd.grad(
        (out * part(case.upstream, 2, rank, count)).sum(),
        [*tensors.values()],
        materialize_grads=True,
    )
    return {"out": out.detach(), **dict(zip(tensors, grads, strict=True))}


def tail(rank: int) -> tuple[Tensor, Tensor]:
    x = (torch.arange(10.0).view(1, 5, 2) + 10 * rank).requires_grad_()
    found = previous_tail(x, 3)
    found.mul(rank + 1).sum().backward()
    assert x.grad is not None
    return found.detach(), x.grad


FADING = ("taylor_token", "taylor_channel")


def before(name: str, rank: int, count: int) -> dict[str, Tensor]:
    """The tensors of the state before a process's keys."""
    tensors = case_of(name, masked=False).tensors
    given = {key: part(x, POSITIONS.get(key, 9), rank, count) for key, x in tensors.items()}
    qkv = [given.pop(key) for key in "qkv"]
    return context_parallel._state_before(*qkv, SPECS[name], None, "chunked", given, None).tensors


@pytest.fixture(scope="module", params=first_quick([2, 4]))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    count, path = request.param, tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        processes.start(
            work,
            *(rank, count, path),
            log=path / "log",
            environment=environment,
            preload=["softmax_rnn"],
        )
        for rank in range(count)
    ]
    for process in started:
        process.join(300)
    codes = [process.exitcode for process in started]
    assert codes == [0] * count, (path / "log").read_text()
    return [torch.load(path / f"{rank}.pt") for rank in range(count)]


def test_outputs_and_gradients_are_those_of_one_process(results: Any) -> None:
    count = len(results)
    keys = [key for key in results[0] if isinstance(key, tuple)]
    assert {name for name, *_ in keys} == {*SPECS}
    assert {form for *_, form in keys} == {"auto", "chunked", "dense"}
    for name, masked, form in keys:
        expected = expected_of(name, masked)
        mine = [found[name, masked, form] for found in results]
        joined = {}
        for key, whole in expected.items():
            dim = 2 if key == "out" else POSITIONS.get(key, 9)
            pieces = [found[key] for found in mine]
            # The gradient of a parameter is the sum of what each process finds.
            joined[key] = torch.cat(pieces, dim) if whole.ndim > dim else sum(pieces)
        assert_close(joined, expected, 1e-10, f"{name}, masked={masked}, {form}, {count} processes")


def test_magnitudes_are_passed_as_the_sums_are(results: Any) -> None:
    for name in FADING:
        tensors = case_of(name, masked=False).tensors
        length = tensors["k"].shape[2]
        for rank, found in enumerate(results):
            past = slice(length * rank // len(results))
            given = {key: x[:, :, past] if key in POSITIONS else x for key, x in tensors.items()}
            qkv = [given.pop(key) for key in "qkv"]
            _, state = sr.attention(*qkv, SPECS[name], return_state=True, **given)
            torch.testing.assert_close(found["before"][name], state.tensors)


def test_the_tail_of_the_process_before(results: Any) -> None:
    count = len(results)
    for rank, found in enumerate(results):
        values, grad = found["tail"]
        before = torch.arange(10.0).view(1, 5, 2)[:, 2:] + 10 * (rank - 1)
        assert torch.equal(values, before if rank else torch.zeros_like(before))
        expected = torch.zeros(1, 5, 2)
        expected[:, 2:] = rank + 2 if rank + 1 < count else 0.0
        assert torch.equal(grad, expected)


def test_every_process_refuses_what_one_refuses(results: Any) -> None:
    said = zip(REFUSED, *(found["refused"] for found in results), strict=True)
    for options, *each in said:
        assert len({*each}) == 1
        assert each[0].startswith("Several processes share"), options


def test_one_process_is_plain_attention_and_mistakes_are_named(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match="needs the processes of torch.distributed"):
        context_parallel_attention(q, q, q, "taylor:2")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1
    )
    try:
        found = context_parallel_attention(q, q, q, "taylor:2")
        assert torch.equal(found, sr.attention(q, q, q, "taylor:2"))
        with pytest.raises(ValueError, match="not \\[3\\] queries and \\[6\\] keys"):
            context_parallel_attention(q[:, :, :3], q, q, "taylor:2")
        with pytest.raises(ValueError, match="takes and returns no state"):
            context_parallel_attention(q, q, q, "taylor:2", return_state=True)
        mask = torch.ones(6, 6, dtype=torch.bool)
        with pytest.raises(ValueError, match="mask must be broadcastable"):
            context_parallel_attention(q, q, q, "taylor:2", mask=mask)
        with pytest.raises(ValueError, match="Did you mean 'chunked'"):
            context_parallel_attention(q, q, q, "taylor:2", form="chunkd")
        with pytest.raises(ValueError, match="the last 8 of 6 tokens"):
            previous_tail(q[0], 8)
    finally:
        distributed.destroy_process_group()
