"""``attention``: what it refuses, and what its denominators promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softmax_rnn as sr
from cases import VARIANTS, WIDENED, Shape, make_case
from quick import first_quick
from softmax_rnn.ops import formula

Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": K.numpy()}, "k must be a torch.Tensor, not ndarray"),
        ({"q": Q[0]}, r"q must be \[batch, heads, length, width\], not \[4, 5, 8\]"),
        ({"k": K[:1]}, "k has batch 1, q has 2"),
        ({"k": K[..., :4]}, "q has width 8, k has 4"),
        ({"v": V[:, :, :3]}, "k and v must share heads and length"),
        ({"k": K[:, :0], "v": V[:, :0]}, "k must have at least one head and width 1, not"),
        ({"q": Q[:, :3]}, "The 2 key/value heads must divide the 3"),
        ({"v": V.double()}, "v has torch.float64"),
        ({"k": K.to("meta")}, "k has torch.float32 on meta"),
        ({"q": Q.int(), "k": K.int(), "v": V.int()}, "floating-point dtype, not torch.int32"),
        ({"q": torch.zeros(2, 4, 9, 8)}, "9 queries and only 7 keys"),
        ({"mask": torch.ones(5, 7)}, "mask must be boolean"),
        ({"mask": [True] * 7}, "mask must be a boolean torch.Tensor, not list"),
        ({"spec": "linear_cosine", "length_power": 0.5}, "length_power must be a torch.Tensor"),
        ({"mask": torch.ones(5, 6, dtype=torch.bool)}, r"\[5, 6\] cannot be broadcast"),
        ({"mask": torch.ones(2, 7, dtype=torch.bool)}, r"keys, \[B, S\], as mask\[:, None, None\]"),
        ({"spec": "nrom"}, "Did you mean 'norm'"),
        ({"form": "blocks"}, "Unknown form 'blocks'. Did you mean 'blocked'"),
        (
            {"spec": "gate", "form": "fused", "output_gate": torch.ones(2, 4, 5)},
            "forms that can: .*blocked, dense",
        ),
        ({"spec": "gate"}, r"needs output_gate, of shape \[2, 4, 5\]"),
        ({"spec": "input_gate"}, r"needs input_gate, of shape \[2, 2, 7\]"),
        ({"spec": "linear_cosine"}, r"needs length_power, of shape \[4\]"),
        ({"output_gate": torch.ones(2, 4, 5)}, "output_gate was given, but this spec"),
        ({"norm_weight": torch.ones(6)}, "norm_weight was given, but this spec"),
        ({"spec": "norm_rms", "norm_bias": torch.ones(6)}, "norm_bias was given"),
        ({"spec": "norm_rms", "norm_weight": torch.ones(8)}, r"shape \[6\], not \[8\]"),
        (
            {"spec": "gate", "output_gate": torch.ones(2, 4, 7)},
            r"shape \[2, 4, 5\], not \[2, 4, 7\]",
        ),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"q": Q, "k": K, "v": V, "spec": "softmax", **change}
    with pytest.raises(ValueError, match=message):
        sr.attention(**arguments)


def test_a_row_that_sees_nothing_is_zero() -> None:
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([False, True, True, True])
    for name in ("softmax", "norm", "taylor:2", "length", "softmax_plus_one"):
        out = sr.attention(q, k, v, name, mask=mask)
        assert (out[0, 0, 0] == 0).all()
        for grad in torch.autograd.grad(out.sum(), (q, k, v)):
            assert grad.isfinite().all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_row_of_zero_values_stays_zero_whatever_its_scores(norm: str) -> None:
    """The norm's epsilon, in units of exp(50), must not vanish."""
    spec = sr.AttentionSpec(denominator="none", norm=norm, scale=1.0)
    q, k, v = torch.full((1, 1, 1, 1), 50.0), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 4)
    for form in sr.forms(spec):
        assert (sr.attention(q, k, v, spec, form=form) == 0).all(), form


@pytest.mark.parametrize("score", [-20.0, -50.0, -60.0, -120.0])
@pytest.mark.parametrize(
    "spec",
    [
        sr.AttentionSpec(clamp=5.0, scale=1.0),
        sr.AttentionSpec(clamp=5.0, scale=1.0, denominator="detached_sum"),
        sr.AttentionSpec(clamp=5.0, scale=1.0, denominator="none", norm="l2"),
        sr.AttentionSpec(clamp=5.0, scale=1.0, denominator="length", norm="l2"),
        sr.AttentionSpec(scale=1.0),
        sr.AttentionSpec(scale=1.0, denominator="none", norm="l2"),
    ],
    ids=["sum", "detached", "l2", "l2_length", "softmax", "norm"],
)
def test_small_weights_count_where_their_scale_does_not(
    spec: sr.AttentionSpec, score: float
) -> None:
    """One key has the whole weight, however small exp(score)."""
    q, k = torch.full((1, 1, 1, 1), score), torch.ones(1, 1, 1, 1)
    v = torch.full((1, 1, 1, 4), 0.5)
    torch.testing.assert_close(sr.attention(q, k, v, spec), v)


def test_the_l2_norm_of_small_powers() -> None:
    spec = sr.AttentionSpec(series="power", order=10, denominator="none", norm="l2", scale=1.0)
    q, k = torch.full((1, 1, 1, 1), 1e-3), torch.ones(1, 1, 1, 1)
    v = torch.full((1, 1, 1, 4), 0.5)
    for form in sr.forms(spec):
        torch.testing.assert_close(sr.attention(q, k, v, spec, form=form), v)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_a_log_decay_above_zero_is_refused(kind: type[Tensor]) -> None:
    x, decay = torch.randn(1, 2, 5, 3), kind(torch.tensor([0.5, -1.0]))
    with pytest.raises(ValueError, match=r"log_decay must be <= 0; the largest is 0.5"):
        sr.attention(x, x, x, sr.AttentionSpec(decay="head"), log_decay=decay)


@pytest.mark.parametrize("size", [1e-15, 1e-12, 1e-8, 1e-3, 1.0, 1e4, 1e9])
@pytest.mark.parametrize("name", ["power:2", "power:3", "power:6"])
def test_quotients_of_powers_of_any_size(name: str, size: float) -> None:
    """A factor of the scores cancels; float32 has no place for its power."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 60, 3, generator=draw, dtype=torch.float64).unbind(0)
    expected = sr.attention(q, k, v, name, form="dense")
    settled = expected.norm(dim=-1) < 20  # an odd power's sum may be near zero
    settled[..., :10] = False  # and a state of few keys holds sums of large numbers that cancel
    for form in sr.forms(name):
        found = sr.attention((q * size).float(), (k * size).float(), v.float(), name, form=form)
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error[settled].median() < 1e-4, form
        assert error[settled].max() < 0.1, form


@pytest.mark.parametrize("later", [1e3, 1e6])
@pytest.mark.parametrize("name", ["power:2", "power:7", "power:8", "quadratic"])
def test_long_keys_that_a_row_does_not_see_leave_it_alone(name: str, later: float) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=draw, dtype=torch.float64).unbind(0)
    k[:, :, :4] *= 1e-3
    expected = sr.attention(q, k, v, name, form="dense")[:, :, :4]
    k[:, :, 4:] *= later
    for form in ("dense", "blocked"):
        found = sr.attention(q.float(), k.float(), v.float(), name, form=form)[:, :, :4]
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("order", "size"), [(8, 1e-3), (10, 3e-3), (12, 1e-2), (2, 1e-3), (12, 100.0), (8, 2000.0)]
)
def test_quotients_of_powers_in_every_type(order: int, size: float, dtype: torch.dtype) -> None:
    """Of inputs that a type can hold: sums are in float32 whatever it is."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 60, 8, generator=draw, dtype=torch.float64).unbind(0)
    q, k, v = (x.to(dtype) for x in (q * size, k * size, v))
    spec = sr.AttentionSpec(series="power", order=order)
    expected = sr.attention(q.double(), k.double(), v.double(), spec, form="dense")
    for form in ("auto", *(form for form in sr.forms(spec) if form in ("native", "blocked"))):
        found = sr.attention(q, k, v, spec, form=form).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize(
    ("query", "key"), [(1e-20, 1e-20), (1e23, 1e23), (1.0, 1e-30), (1e30, 1.0)]
)
@pytest.mark.parametrize("form", sr.forms("power:2"))
def test_factors_beyond_float32(query: float, key: float, form: str) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 1, 30, 4, generator=draw, dtype=torch.float64).unbind(0)
    expected = sr.attention(q, k, v, "power:2", form="dense")[:, :, 9:]
    inputs = [x.float().requires_grad_() for x in (q * query, k * key, v)]
    found = sr.attention(*inputs, "power:2", form=form)
    torch.testing.assert_close(found[:, :, 9:].double(), expected, rtol=1e-3, atol=1e-3)
    for grad in torch.autograd.grad(found.sum(), inputs):
        assert not grad.isnan().any()


@pytest.mark.parametrize("scale", [1e-6, 1e5])
def test_the_scale_of_a_power_cancels(scale: float) -> None:
    q, k, v = torch.randn(3, 1, 1, 20, 4).unbind(0)
    plain, scaled = (sr.AttentionSpec(series="power", order=8, scale=x) for x in (1.0, scale))
    found = sr.attention(q, k, v, scaled, form="blocked")
    torch.testing.assert_close(found, sr.attention(q, k, v, plain, form="blocked"))


@pytest.mark.parametrize("form", ["dense", "blocked", "chunked", "recurrent"])
@pytest.mark.parametrize("name", ["taylor_relu:4", "taylor_relu:7", "taylor:4"])
def test_a_short_key_beside_an_orthogonal_long_one(name: str, form: str) -> None:
    """What the long one adds to the state, the query does not read."""
    k = torch.tensor([[1e3, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
    q, v = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2), torch.tensor([5.0, 1.0]).view(1, 1, 2, 1)
    expected = sr.attention(q.double(), k.double(), v.double(), name, causal=False, form="dense")
    found = sr.attention(q, k, v, name, causal=False, form=form)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", ["dense", "blocked", "chunked", "recurrent"])
@pytest.mark.parametrize("norm", ["l2", "rms", "layer"])
def test_a_norm_at_a_pole_of_the_row_sum(norm: str, form: str) -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([-1.0, 0.0]).view(1, 1, 2, 1)
    spec = sr.AttentionSpec(
        series="power", order=1, denominator="sum_plus_one", norm=norm, scale=1.0
    )
    out = sr.attention(
        q, k, torch.tensor([[1.0, 2.0]] * 2)[None, None], spec, causal=False, form=form
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("denominator", ["sum_plus_one", "clamped_sum", "detached_sum"])
def test_a_norm_of_small_clamped_weights(denominator: str) -> None:
    """Their sum is nothing beside the offset or floor, which the norm cancels."""
    epsilon = 1e-4 if denominator == "detached_sum" else 0.0
    spec = sr.AttentionSpec(clamp=5.0, denominator=denominator, norm="l2", epsilon=epsilon)
    q, k = torch.full((1, 1, 1, 1), 15.0), torch.full((1, 1, 2, 1), -10.0)
    v = torch.tensor([[3.0, 4.0]] * 2)[None, None]
    for form in sr.forms(spec):
        out = sr.attention(q, k, v, spec, causal=False, form=form)
        torch.testing.assert_close(out, v[:, :, :1] / 5)


@pytest.mark.parametrize("form", ["dense", "blocked", "chunked", "recurrent"])
def test_a_sum_of_powers_that_crosses_zero(form: str) -> None:
    """The guard is in units of the weights: tiny ones are no noise, and none divides by zero."""
    k = torch.tensor([[[[1.0], [-1.0]]]])
    v = torch.tensor([[[[1.0, 2.0], [3.0, 5.0]]]])
    q = torch.full((1, 1, 2, 1), 1e-3)
    out = sr.attention(q, k, v, "power:3", form=form)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])
    assert out.isfinite().all()


def test_no_queries_with_a_mask_of_queries() -> None:
    q, k = torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 5, 4)
    mask = torch.ones(1, 2, 0, 5, dtype=torch.bool)
    for name in ("length", "linear_cosine", "power:3", "softmax"):
        extra = {"length_power": torch.ones(2)} if name == "linear_cosine" else {}
        for causal in (True, False):
            out = sr.attention(q, k, k, name, mask=mask, causal=causal, **extra)
            assert out.shape == (1, 2, 0, 4)


@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=["batch", "query", "key"]
)
@pytest.mark.parametrize("name", ["softmax", "norm", "length", "taylor:2", "softmax_plus_one"])
def test_nothing_in_nothing_out(name: str, batch: int, queries: int, keys: int) -> None:
    """Some kernels end the process with a division by zero here."""
    q, k, v = (torch.ones(batch, 2, *size) for size in ((queries, 4), (keys, 4), (keys, 5)))
    for form in sr.forms(name):
        out = sr.attention(q, k, v, name, form=form, causal=keys > 0)
        assert torch.equal(out, torch.ones(batch, 2, queries, 5) * bool(keys))


def test_length_counts_visible_keys_not_positions() -> None:
    q, k, v = (torch.randn(1, 1, 6, 8) for _ in range(3))
    padded = [torch.cat([torch.randn(1, 1, 3, 8), x], dim=2) for x in (q, k, v)]
    mask = torch.arange(9) >= 3
    expected = sr.attention(q, k, v, "length")
    torch.testing.assert_close(sr.attention(*padded, "length", mask=mask)[:, :, 3:], expected)


def test_odd_series_keeps_its_sum_from_zero_and_its_sign() -> None:
    spec = sr.AttentionSpec(series="taylor", order=1, scale=1.0)
    k, v = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    for score in (-1.0, -1.0 + 1e-7, -1.0 - 1e-7):
        out = sr.attention(torch.full((1, 1, 1, 1), score), k, v, spec)
        assert out.isfinite().all()
    below = sr.attention(torch.full((1, 1, 1, 1), -3.0), k, v, spec)
    torch.testing.assert_close(below, v)  # (1 - 3) v / (1 - 3)


def test_a_gate_before_the_l2_norm_does_nothing() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    gate = torch.rand(1, 2, 9) + 0.1
    gated = sr.attention(q, k, v, "norm_gate_before", output_gate=gate)
    torch.testing.assert_close(gated, sr.attention(q, k, v, "norm"))


def test_autocast_leaves_the_result_alone() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    for name in ("softmax", "taylor:4", "clamped"):
        plain = sr.attention(q, k, v, name)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(sr.attention(q, k, v, name), plain)


@pytest.mark.parametrize("name", first_quick(["norm", "gate", "taylor:4"]))
def test_torch_compile(name: str) -> None:
    gate = {"output_gate": torch.rand(1, 2, 40)} if name == "gate" else {}
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda: sr.attention(q, k, v, name, **gate), backend="aot_eager")
    expected = sr.attention(q, k, v, name, **gate)
    found = compiled()
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (q, k, v)),
        torch.autograd.grad(expected.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", first_quick(["forgetting", "taylor_token"]))
def test_torch_compile_with_dynamic_shapes(name: str) -> None:
    """One graph for any length; without gradients, too."""
    spec = WIDENED[name]
    compiled = torch.compile(
        lambda **tensors: sr.attention(spec=spec, **tensors),
        **{"backend": "eager", "dynamic": True, "fullgraph": True},
    )
    for length in (40, 53):
        case = make_case(spec, shape=Shape(1, 2, 1, length, length))
        torch.testing.assert_close(
            compiled(**case.tensors), sr.attention(spec=spec, **case.tensors)
        )


@pytest.mark.parametrize("height", [50.0, 100.0, 200.0])
def test_a_sink_beside_large_weights(height: float) -> None:
    """Weights of e^166: only the larger sink takes part of the sum."""
    spec = sr.AttentionSpec(series="power", order=2, denominator="sum_plus_sink")
    q, v = (torch.full((1, 1, 3, 2), size, dtype=torch.float64) for size in (1e12, 1.0))
    sink = torch.tensor([height], dtype=torch.float64, requires_grad=True)
    outs = [attend(q, 1e12 * q, v, spec, sink=sink) for attend in (sr.attention, formula.attention)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), sink) for out in outs))
    assert (outs[0].amax() < 1e-10) == (height == 200.0)


@pytest.mark.parametrize("name", [*VARIANTS, *WIDENED])
def test_shapes_without_data(name: str) -> None:
    case = make_case(WIDENED.get(name) or sr.variant(name), shape=Shape(queries=5, keys=7))
    inputs = {key: x.to("meta") for key, x in case.tensors.items()}
    out = sr.attention(spec=case.spec, form="blocked", **inputs)
    assert out.shape == (2, 4, 5, 6)
    assert out.is_meta
