"""The blocked form skips keys, and only those that do not matter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close, make_case
from softmax_rnn.ops.decay import FLOOR, per_key_decay
from softmax_rnn.ops.forms.pairs.blocks import BLOCK, Blocks, Step

LONG = Shape(1, 4, 2, 900, 930, 8, 6)


def blocks_of(case: Case, dtype: torch.dtype = torch.float64) -> Blocks:
    """The blocks of a case, as the forward pass has them."""
    q, k, v = (case.tensors[name].to(dtype) for name in "qkv")
    log_decay = case.tensors.get("log_decay")
    if log_decay is not None:
        log_decay = per_key_decay(log_decay, k, case.mask)
    return Blocks(q, k, v, log_decay, None, case.mask, case.spec, case.causal)


def pairs(steps: list[Step]) -> int:
    """How many scores the steps compute, for one query head per key head."""
    return sum(
        (s.heads.stop - s.heads.start) * (s.stop - s.start) * (s.last - s.first) for s in steps
    )


@pytest.mark.parametrize("name", ["window", "window_global", "forgetting", "taylor_token"])
def test_time_is_linear(name: str) -> None:
    found = []
    for length in (2048, 4096):
        shape = dataclasses.replace(LONG, queries=length, keys=length)
        case = make_case(WIDENED[name], shape=shape, decay=1.0)
        found.append(pairs(list(blocks_of(case))))
    assert found[1] < 2.2 * found[0]
    assert found[1] < 0.3 * 2 * 4096**2 / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["forgetting", "forgetting_head", "taylor_token"])
def test_skipped_keys_have_no_weight(name: str, dtype: torch.dtype) -> None:
    """Every weight outside the steps is so small that it counts as 0; some key is skipped."""
    case = make_case(WIDENED[name], shape=LONG, decay=8.0 if dtype == torch.float64 else 1.0)
    q, k, _ = (case.tensors[name] for name in "qkv")
    log_decay = per_key_decay(case.tensors["log_decay"], k, None)
    total = log_decay.cumsum(2).repeat_interleave(2, 1)
    exponents = total[:, :, 30:, None] - total[:, :, None]
    if case.spec.series == "exp":
        exponents = exponents + q @ k.repeat_interleave(2, 1).mT / 8**0.5
    later = torch.ones(900, 930, dtype=torch.bool).triu(31)
    exponents = exponents.masked_fill(later, -torch.inf)
    if case.spec.series == "exp":
        exponents = exponents - exponents.amax(-1, keepdim=True)
    needed = exponents > FLOOR[dtype]
    skipped = 0
    for step in blocks_of(case, dtype):
        rows = needed[0].unflatten(0, (2, 2))[step.rows]
        assert not rows[..., : step.first].any()
        skipped += step.first
    assert skipped > 0


def test_a_key_that_has_faded_counts_where_nearer_ones_are_hidden_from_its_query() -> None:
    """With a mask per query, a row's largest weight may belong to a key that has faded to 0."""
    case = make_case(WIDENED["forgetting"], shape=LONG, decay=5.0)
    mask = torch.ones(1, 1, 900, 930, dtype=torch.bool)
    mask[:, :, 600:, 300:] = False
    case = dataclasses.replace(case, mask=mask)
    expected = case.run(sr.attention, form="dense")
    assert expected["out"][:, :, 700:].abs().amin() > 0
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        assert_close(case.run(sr.attention, dtype, form="blocked"), expected, tolerance)


@pytest.mark.parametrize("mask", ["none", "padding", "full"])
@pytest.mark.parametrize("window", [1, 60, BLOCK, 250])
@pytest.mark.parametrize("name", ["window_global", "window_decay", "power_channel"])
def test_global_keys(name: str, window: int, mask: str) -> None:
    """Inside the window, inside a block's range of keys, and before it."""
    spec = dataclasses.replace(WIDENED[name], window=window, global_keys=5)
    shape = Shape(queries=300, keys=310)
    case = make_case(spec, shape=shape, mask=mask, decay=0.05)
    expected = case.run(sr.attention, form="dense")
    assert_close(case.run(sr.attention, form="blocked"), expected, 1e-10)


def test_fewer_visible_keys_than_global_ones() -> None:
    spec = sr.AttentionSpec(window=3, global_keys=20)
    case = make_case(spec, shape=Shape(queries=30, keys=40))
    mask = torch.zeros(2, 1, 1, 40, dtype=torch.bool)
    mask[0, ..., 5:12] = True
    mask[1, ..., 30:] = True
    case = dataclasses.replace(case, mask=mask)
    expected = case.run(sr.attention, form="dense")
    assert_close(case.run(sr.attention, form="blocked"), expected, 1e-10)


@pytest.mark.parametrize("name", ["forgetting", "retention", "exp_channel"])
def test_near_keys_keep_their_precision_after_a_steep_fall(name: str) -> None:
    """Running sums of thousands would round differences of hundredths in float32."""
    case = make_case(WIDENED[name], shape=Shape(1, 2, 1, 300, 300), decay=0.01)
    if name == "retention":
        case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, decay="token"))
        case.tensors["log_decay"] = make_case(case.spec, shape=Shape(1, 2, 1, 300, 300)).tensors[
            "log_decay"
        ]
    case.tensors["log_decay"][:, :, 140] = -9000.0
    expected = case.run(sr.attention, form="dense")
    found = case.run(sr.attention, torch.float32, form="blocked")
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("decay", [0.1, 3.0])
@pytest.mark.parametrize("name", ["forgetting_head", "retention"])
def test_the_gradient_of_a_decay_is_more_than_rounding(name: str, decay: float) -> None:
    """A strong decay has a small gradient, beside large terms that cancel."""
    case = make_case(WIDENED[name], shape=Shape(1, 2, 1, 900, 900), decay=decay)
    expected = case.run(sr.attention)["log_decay"]
    found = case.run(sr.attention, torch.float32, form="blocked")["log_decay"]
    assert float((found - expected).norm() / expected.norm()) < 2e-3


def test_half_precision() -> None:
    for name in ("forgetting", "window_decay", "learned_polynomial_token", "taylor_channel"):
        case = make_case(WIDENED[name], mask="padding")
        rounded = {key: x.bfloat16().double() for key, x in case.tensors.items()}
        case = dataclasses.replace(
            case, tensors=rounded, upstream=case.upstream.bfloat16().double()
        )
        expected = case.run(sr.attention, form="dense")
        found = case.run(sr.attention, torch.bfloat16, form="blocked")
        assert_close(found, expected, 4e-2, name)


@pytest.mark.parametrize("wrt", ["q", "log_decay", "coefficients"])
def test_second_derivatives_are_refused(wrt: str) -> None:
    case = make_case(WIDENED["learned_polynomial_token"])
    tensors = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    q, k, v = (tensors.pop(name) for name in "qkv")
    out = sr.attention(q, k, v, case.spec, form="blocked", **tensors)
    inputs: dict[str, Tensor] = {"q": q, **tensors}
    (first,) = torch.autograd.grad(out.square().sum(), inputs[wrt], create_graph=True)
    with pytest.raises(NotImplementedError, match="Second derivative"):
        torch.autograd.grad(first.square().sum(), inputs[wrt])


@pytest.mark.slow
def test_compiled_it_is_one_graph() -> None:
    """While tracing no decay is read, so that no key is skipped for it."""
    case = make_case(WIDENED["window_decay"], shape=Shape(1, 2, 2, 150, 150, 8, 8), decay=3.0)
    tensors = {key: x.requires_grad_() for key, x in case.tensors.items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return sr.attention(q, k, v, case.spec, log_decay=log_decay, form="blocked")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = (f(**tensors) for f in (compiled, attend))
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.sum(), list(tensors.values())) for x in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_shapes_without_data() -> None:
    q = torch.zeros(2, 4, 300, 8, device="meta")
    log_decay = torch.zeros(2, 4, 300, device="meta")
    for spec in (WIDENED["forgetting"], WIDENED["window_decay"]):
        out = sr.attention(q, q, q[..., :3], spec, form="blocked", log_decay=log_decay)
        assert out.shape == (2, 4, 300, 3)
