"""Sums that cancel in a state: every engine against float64, with bounds from the inputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, library

import softmax_rnn as sr
from cancellation import CANCELLING, exact
from softmax_rnn.ops import attention as operation
from softmax_rnn.ops import plan
from softmax_rnn.ops.finish import SUM_GUARD
from softmax_rnn.ops.forms.chunks import magnitudes
from softmax_rnn.ops.forms.chunks.chunked import chunked
from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.pairs.dense import dense
from strategies import coefficients

# Over so many tokens, rounding errors add up to at most this many of `Exact.rounding`.
LONGEST, ERRORS = 64, 64.0
EPS = torch.finfo(torch.float32).eps
# `tokens` and `calls` decode: one token in PyTorch's operations, and in one call of C++.
FADED = "the same key with both signs"  # of which a sum of 2e-42 is left
ENGINES = ("torch", "native", "recurrent", "tokens", "calls")


@contextlib.contextmanager
def computed_by(engine: str) -> Iterator[None]:
    """In chunks of 16 tokens."""
    with contextlib.ExitStack() as stack:
        plan.forget()
        stack.callback(plan.forget)
        stack.enter_context(mock.patch.object(plan, "chunk_length", return_value=16))
        if engine in ("torch", "triton"):
            stack.enter_context(mock.patch.object(plan, "loops", return_value=engine))
        stack.enter_context(mock.patch.object(cpp, "LEAST_TOKENS", 1))
        if engine != "calls":
            stack.enter_context(mock.patch.object(operation, "_SHORT", {}))
        yield


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: sr.AttentionSpec,
    engine: str,
    causal: bool = True,
    cuts: tuple[int, ...] = (),
    log_decay: Tensor | None = None,
    learned: Tensor | None = None,
) -> Tensor:
    """The output in pieces of keys that end at the cuts; every query sees the last of these."""
    state, outs = None, []
    options = {"form": "recurrent" if engine == "recurrent" else "chunked", "coefficients": learned}
    if engine in ("tokens", "calls"):
        options["form"] = "auto"
        cuts = tuple(range(1, k.shape[2])) if causal else cuts
    ends = [0, *cuts, k.shape[2]]
    with computed_by(engine):
        for start, stop in itertools.pairwise(ends):
            here = slice(start, stop)
            queries = q[:, :, here]
            if not causal:
                queries = q if stop == k.shape[2] else q[:, :, :0]
            out, state = sr.attention(
                queries,
                k[:, :, here],
                v[:, :, here],
                spec,
                causal=causal,
                state=state,
                return_state=True,
                log_decay=None if log_decay is None else log_decay[:, :, here],
                **options,
            )
            outs.append(out)
    return torch.cat(outs, dim=2)


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: sr.AttentionSpec, **given) -> None:
    """No output exceeds the promise, and where the sum is not lost the error is small."""
    learned, decay = given.get("learned"), given.get("log_decay")
    rows = exact(q, k, v, spec, given["causal"], decay, learned, EPS)
    assert out.isfinite().all()
    assert (out.abs().amax(-1) <= 1.001 / SUM_GUARD * rows.largest).all()
    rounding = ERRORS * rows.rounding
    sure = rows.total.abs() > 4 * rounding
    expected = rows.out.abs().amax(-1)
    error = (out.double() - rows.out).abs().amax(-1)
    allowed = 2 * rounding * (rows.largest + expected) / rows.total.abs()
    assert (error <= allowed)[sure].all(), (error / allowed)[sure].max()


@given(
    series=st.sampled_from(["power", "power", "taylor", "fixed", "learned"]),
    order=st.sampled_from([1, 3, 2, 4]),
    fixed=coefficients(),
    decay=st.sampled_from(["none", "none", "none", "token", "channel"]),
    speed=st.sampled_from([1e-3, 0.1, 3.0]),
    feature_map=st.sampled_from(["identity", "identity", "identity", "cosine", "relu"]),
    denominator=st.sampled_from(["sum", "sum", "sum", "sum_plus_one"]),
    keys=st.sampled_from(list(CANCELLING)),
    size=st.sampled_from([0.3, 1.0, 5.0]),
    width=st.sampled_from([1, 4, 9]),
    group=st.sampled_from([1, 2]),
    half=st.integers(1, LONGEST // 2),
    cuts=st.lists(st.integers(1, LONGEST - 1), max_size=2, unique=True),
    causal=st.booleans(),
    engine=st.sampled_from(ENGINES),
    seed=st.integers(0, 999),
)
@example(
    "power", 1, (1.0,), "token", 3.0, "relu", "sum", FADED, 0.3, 1, 1, 24, [], True, "tokens", 7
)
def test_keys_that_cancel(
    series: str,
    order: int,
    fixed: tuple[float, ...],
    decay: str,
    speed: float,
    feature_map: str,
    denominator: str,
    keys: str,
    size: float,
    width: int,
    group: int,
    half: int,
    cuts: list[int],
    causal: bool,
    engine: str,
    seed: int,
) -> None:
    spec = sr.AttentionSpec(
        feature_map=feature_map,
        series="polynomial" if series in ("fixed", "learned") else series,
        order=None if series == "fixed" else order,
        coefficients=fixed if series == "fixed" else None,
        decay=decay,
        denominator=denominator,
    )
    draw, length = torch.Generator().manual_seed(seed), 2 * half

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    inputs: dict[str, Tensor | None] = {
        "q": size * normal(1, 2 * group, length, width),
        "k": CANCELLING[keys](normal(1, 2, length, width)),
        "v": normal(1, 2, length, 3),
    }
    options: dict = {"causal": causal or spec.positional, "log_decay": None, "learned": None}
    if decay != "none":
        shape = (1, 2, length) if decay == "token" else (1, 2, length, width)
        options["log_decay"] = -speed * normal(*shape).square()
    if series == "learned":
        options["learned"] = normal(2 * group, order + 1)
    cut = tuple(sorted(x for x in cuts if x < length))
    with torch.no_grad():
        found = attended(**inputs, spec=spec, engine=engine, cuts=cut, **options)
    check(found, **inputs, spec=spec, **options)


# Half of the keys are the negatives of the others.
HALF = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(1, 1, 300, 8, generator=HALF) for _ in "qkv")
K = CANCELLING["halves"](K)
LINEAR = sr.AttentionSpec(series="power", order=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("engine", ["torch", "native", "recurrent"])
def test_keys_and_their_negatives(engine: str, causal: bool) -> None:
    check(attended(Q, K, V, LINEAR, engine, causal), Q, K, V, LINEAR, causal=causal)


@pytest.mark.parametrize("engine", ["tokens", "calls"])
def test_a_token_after_keys_that_cancel(engine: str) -> None:
    with torch.no_grad():
        found = attended(Q[:, :, -1:], K, V, LINEAR, engine, causal=False, cuts=(299,))
    check(found, Q[:, :, -1:], K, V, LINEAR, causal=False)


@pytest.mark.parametrize("engine", ["torch", "native", "recurrent"])
def test_gradients_where_keys_cancel(engine: str) -> None:
    """A weight sum is at least its noise, by which every derivative is divided."""
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    out = attended(*inputs, LINEAR, engine, causal=False)
    scale = LINEAR.score_scale(8)
    sizes = K.abs().sum(2, keepdim=True)
    noise = magnitudes.ROUNDING * EPS * scale * (Q * sizes).norm(dim=-1, keepdim=True)
    above = out.shape[-1] * (V.abs().amax() + out.detach().abs().amax(-1, keepdim=True)) / noise
    allowed = [
        scale * sizes * above,
        (scale * Q.abs() * above).sum(2, keepdim=True),
        ((scale * Q @ K.mT).abs() / noise).sum(2).unsqueeze(-1),
    ]
    for grad, most in zip(torch.autograd.grad(out.sum(), inputs), allowed, strict=True):
        assert (grad.abs() <= 1.01 * most).all()


def test_the_operator_is_well_formed() -> None:
    """PyTorch's own checks: schema, shapes without data."""
    for decay, width in (("none", 0), ("token", 1), ("channel", 3)):
        q, k = torch.randn(2, 3, 2, 40), torch.randn(2, 3, 50)
        log_decay = -torch.rand(2, width, 50, dtype=torch.float64) if width else None
        for learned, before in ((None, None), (torch.randn(2, 2, 4), torch.rand(2, 3, 3))):
            series = "taylor" if learned is None else "polynomial"
            plan = series, 3, None, decay, width > 0, 16, 0.5
            arguments = q, k, log_decay, learned, before, *plan
            library.opcheck(torch.ops.softmax_rnn.read_noise, arguments)


@pytest.mark.parametrize("decay", ["none", "token"])
def test_triton_reads_the_same_noise(decay: str, device: str) -> None:
    """Of chunks of 64 tokens; heads in groups."""
    spec = sr.AttentionSpec(series="taylor", order=1, decay=decay)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 150, 16, generator=draw).to(device) for n in (2, 1, 1))
    options = {"causal": True, "mask": None, "keep_state": True, "chunk": 64}
    if decay != "none":
        options["log_decay"] = -torch.rand(1, 1, 150, dtype=torch.float64, device=device)
    found, expected = (chunked(q, k, v, spec, **options, engine=x) for x in ("triton", "torch"))
    torch.testing.assert_close(found.noise, expected.noise)
    torch.testing.assert_close(found.magnitudes, expected.magnitudes)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_below_its_floor_is_no_noise(engine: str) -> None:
    """Its rounding error is larger than the floor, by which it is divided all the same."""
    spec = sr.AttentionSpec(series="taylor", order=3, floor=1.0)
    q = torch.full((1, 1, 40, 1), 3e3)
    k, v = -torch.ones(1, 1, 40, 1), torch.ones(1, 1, 40, 1)
    scores = q.double() @ k.double().mT
    weights = (1 + scores + scores**2 / 2 + scores**3 / 6).tril()
    with torch.no_grad():
        found = attended(q, k, v, spec, engine)
    torch.testing.assert_close(found.double(), weights @ v.double(), rtol=1e-4, atol=0.0)
    assert EPS * weights.abs().sum(-1).min() > spec.floor


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(
    "name", ["power:1", "power:2", "taylor:1", "taylor:2", "taylor:4", "taylor:6"]
)
def test_ordinary_sums_are_above_their_noise(name: str, width: int) -> None:
    """Sums over normal keys: none of those that cannot cross zero, and hardly any of the others."""
    family, _, order = name.partition(":")
    spec = sr.AttentionSpec(series=family, order=int(order))
    weights = spec.series, spec.order, None, "none"
    for size, tokens in itertools.product([0.1, 1.0, 10.0], [30, 1000]):
        draw = torch.Generator().manual_seed(tokens)
        q, k = (torch.randn(1, 1, tokens, width, generator=draw) for _ in "qk")
        options = {"causal": False, "mask": None}
        total = dense(size * q, k, k, spec, **options).weight_sum
        columns = Columns(size * q.movedim(3, 1), k[0].mT, k[0].mT, None, None, None)
        scale = spec.score_scale(width)
        noise, _ = magnitudes.read_noise(columns, None, weights, False, 16, scale)
        lost = (total.abs() < noise).double().mean()
        assert lost <= (0 if spec.sign_definite else 1e-3)


def test_every_addition_to_a_state_rounds_it() -> None:
    """Tokens one by one, of which all but the last cancel: what is left is known to be noise."""
    draw, spec = torch.Generator().manual_seed(0), sr.AttentionSpec(series="power", order=1)
    k = torch.randn(4000, generator=draw)
    k = torch.cat([k, -k[torch.randperm(len(k), generator=draw)]])
    state, one = None, torch.ones(1, 1, 1, 1)
    for key in k.tolist():
        _, state = sr.attention(one, one * key, one, spec, state=state, return_state=True)
    error = float((state.sums.double() - k.double().sum()).abs().max())
    known = EPS * magnitudes.ROUNDING * state.magnitudes.item()
    grown = known * magnitudes.growth(state.tokens, 1, 1, True, 1, one).item()
    assert error <= grown
    assert grown > 50 * known
