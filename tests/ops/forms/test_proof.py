"""Kernels that prove themselves, and kernels made wrong on purpose; in Triton's interpreter."""

from __future__ import annotations

import importlib
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED
from softmax_rnn.ops import plan
from softmax_rnn.ops.forms.gpu import chunks, pairs, proof
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.signature import signature

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one, and a small case."""
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path))
    small = {"_QUERIES": 35, "_KEYS": 67, "_HEADS": 2, "_KV_HEADS": 1}
    for name, size in small.items():
        monkeypatch.setattr(proof, name, size)
    proof._known.cache_clear()
    yield tmp_path
    proof._known.cache_clear()


@pytest.fixture
def groups(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of query heads, in cases that show whether each reads its own keys."""
    monkeypatch.setattr(proof, "_HEADS", 4)
    monkeypatch.setattr(proof, "_KV_HEADS", 2)


def failure(
    spec: sr.AttentionSpec | str,
    device: str,
    kind: proof.Kind = "pairs",
    dtype: torch.dtype = torch.float32,
) -> str:
    spec = sr.variant(spec) if isinstance(spec, str) else spec
    return proof.failure(kind, spec, dtype, 16, 16, torch.device(device))


SPECS = {
    "gate": sr.variant("gate"),
    "linear_elu": sr.variant("linear_elu"),
    "norm_rms": sr.variant("norm_rms"),
    "window": WIDENED["window_decay"],
    "learned": WIDENED["learned_polynomial_token"],
    "power": sr.AttentionSpec(series="power", order=4, scale=-9.0, clamp=0.5, denominator="length"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gate", torch.float16),
        ("gate", torch.float32),
        ("linear_elu", torch.bfloat16),
        ("norm_rms", torch.float16),
        ("window", torch.bfloat16),
        ("window", torch.float64),
        ("learned", torch.float16),
        ("power", torch.bfloat16),
    ],
)
def test_right_kernels_of_pairs(
    name: str, dtype: torch.dtype, device: str, request: pytest.FixtureRequest
) -> None:
    """Each spec in a type that rounds much; one in each of the others."""
    if dtype == torch.float32:
        request.getfixturevalue("groups")
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("slow on most GPUs")
    assert not failure(SPECS[name], device, dtype=dtype)


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [(decay, torch.bfloat16) for decay in ("none", "head", "token")] + [("token", torch.float32)],
)
def test_right_kernels_of_chunks(
    decay: str, dtype: torch.dtype, device: str, request: pytest.FixtureRequest
) -> None:
    if dtype == torch.float32:
        request.getfixturevalue("groups")
    spec = sr.AttentionSpec(series="taylor", order=2, decay=decay, floor=0.1)
    assert not failure(spec, device, "chunks", dtype)


WRONG = {
    "sums": ("sums", 0),
    "gradient of q": ("query_grads", 3),
    "gradient of k": ("key_grads", 3),
    "gradient of v": ("key_grads", 4),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_found_out_once(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    kernel, place = WRONG[name]
    launch, launched = pairs._launch, []

    def wrong(called: str, inputs: Any, outputs: tuple[Tensor, ...], *rest: Any) -> None:
        launch(called, inputs, outputs, *rest)
        launched.append(called)
        if called == kernel:
            outputs[place].mul_(1.2)

    monkeypatch.setattr(pairs, "_launch", wrong)
    with pytest.warns(UserWarning, match=rf"is not used on .*: its {name} has a relative error"):
        assert name in failure("gate", device)
    count = len(launched)
    assert count >= 3
    proof._known.cache_clear()  # another process
    with pytest.warns(UserWarning, match="is not used on"):
        assert name in failure("gate", device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name in failure("gate", device)
    assert len(launched) == count
    (kept,) = cache.rglob("*.json")
    assert name in json.loads(kept.read_text())["failure"]
    kept.write_text("{")  # what cannot be read is tried again
    proof._known.cache_clear()
    monkeypatch.setattr(pairs, "_launch", launch)
    assert not failure("gate", device)


def zero_a_row(called: str, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
    if called == "sums":
        outputs[0][:, 1, -1] = 0.0


def forget_the_mask(called: str, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
    if called == "sums" and inputs[3] is not None:
        outputs[0].mul_(1.5)


@pytest.mark.parametrize("spoil", [zero_a_row, forget_the_mask])
def test_small_mistakes_are_found(spoil: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where rounding is large; also where a kernel is right without a mask."""
    launch = pairs._launch

    def wrong(called: str, inputs: Any, outputs: tuple[Tensor, ...], *rest: Any) -> None:
        launch(called, inputs, outputs, *rest)
        spoil(called, inputs, outputs)

    monkeypatch.setattr(pairs, "_launch", wrong)
    with pytest.warns(UserWarning, match="its sums has a relative error"):
        assert failure("norm_rms", device, dtype=torch.bfloat16)


def test_large_weights_in_float16_are_no_mistake(device: str) -> None:
    assert not failure(sr.AttentionSpec(feature_map="elu1"), device, dtype=torch.float16)


def test_what_surrounds_a_call_does_not_matter(device: str) -> None:
    with torch.device("meta"), torch.autocast(device, torch.bfloat16), torch.inference_mode():
        assert not failure("gate", device)


def test_a_kernel_that_does_not_compile(
    device: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("PassManager::run failed\nmore")

    monkeypatch.setattr(chunks, "sums", broken)
    with pytest.warns(UserWarning, match="RuntimeError: PassManager::run failed. Other forms"):
        assert failure("taylor:2", device, "chunks")
    assert not [*cache.rglob("*.json")]  # it may be the process: the next one tries again


def test_every_source_and_version_is_tried_anew(
    device: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(proof, "_difference", lambda *case: tried.append(case) or "")
    for number, change in enumerate((None, "2.99", None, "2.98"), 1):
        proof._known.cache_clear()
        if change:
            monkeypatch.setattr(torch, "__version__", change)
        assert not failure("gate", device)
        assert len([*cache.rglob("*.json")]) == len(tried) == (1, 2, 2, 3)[number - 1]


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("why", ["", "it is wrong"])
def test_auto_takes_the_next_form(
    why: str, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, of which the numbers are never read here."""
    monkeypatch.setattr(proof, "failure", lambda *_: why)
    monkeypatch.setattr(plan, "_has_tensor_cores", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    x = torch.zeros(1, 2, 2048, 16)
    cuda = torch.device("cuda")
    types = (torch.float32, cuda) * 3
    for name, taken in (("gate", "triton"), ("taylor:2", "chunked")):
        call = Call(x, x, x, sr.variant(name), output_gate=None)
        found = plan._plan(call, signature(call)._replace(types=types))
        assert found.lasting is not capturing  # while a graph is captured, none is tried
        if name == "gate":
            assert found.name == ("blocked" if why else taken)
        else:
            assert found.name == taken
            assert found.options["engine"] == ("torch" if why else "triton")


def test_a_kernel_may_be_tried_while_a_graph_is_traced(device: str) -> None:
    spec = sr.variant("gate")

    def traced(x: Tensor) -> Tensor:
        of_kernel = torch.float32, 16, 16, torch.device(device)
        return x if proof.failure("pairs", spec, *of_kernel) else x + 1

    torch.compiler.reset()
    compiled = torch.compile(traced, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [1, 1]


def test_the_session_on_a_gpu_notes_every_step(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    session = importlib.import_module("benchmarks.gpu_session")
    for name, value in {
        "WIDTHS": (16,),
        "DTYPES": (torch.float32,),
        "PROVED": ("taylor:2",),
    }.items():
        monkeypatch.setattr(session, name, value)
    assert not session.proofs(torch.device(device), -math.inf)  # no time is left
    rows = session.proofs(torch.device(device), math.inf)
    assert [(row["kind"], row["failure"]) for row in rows] == [("pairs", ""), ("chunks", "")]
    steps = {"good": (["this"], 1.0), "long": (["antigravity"], 1.0)}
    monkeypatch.setattr(session, "STEPS", steps)
    monkeypatch.setattr(session, "proofs", lambda *_: rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session, "step", lambda words, _: {"code": int(words != ["this"])})
    out = tmp_path / "session.json"
    assert session.main(["--out", str(out), "--steps", "good"]) == 0
    assert json.loads(out.read_text())["good"] == {"code": 0}
    assert session.main(["--out", str(out), "--steps", *steps]) == 1
    assert json.loads(out.read_text())["long"] == {"code": 1}


def test_a_step_of_the_session_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    session = importlib.import_module("benchmarks.gpu_session")
    found = session.step(["timeit", "-n1", "-r1", "import time; time.sleep(30)"], 0.5)
    assert found["code"] is None
    assert session.step(["this"], 30.0)["code"] == 0


def test_what_was_tried_is_listed_for_this_machine(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = torch.device(device)
    monkeypatch.setattr(proof, "_difference", lambda *_: "")
    assert proof.proofs(place) == []
    assert not failure("norm", device)
    (found,) = proof.proofs(place)
    assert (found["kind"], found["dtype"], found["failure"]) == ("pairs", "torch.float32", "")
    machine = proof._machine
    monkeypatch.setattr(proof, "_machine", lambda *of: machine(*of) | {"driver": "another"})
    assert proof.proofs(place) == []
