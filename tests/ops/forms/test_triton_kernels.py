"""The Triton kernels against dense in float64: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from triton_cases import (
    BOUNDED,
    COMPUTED,
    SHIFTED,
    SMALL,
    TOLERANCE,
    check,
    python,
    run,
)

import softmax_rnn as sr
from cases import MASKS, Shape, assert_close, make_case
from softmax_rnn.ops.spec import AttentionSpec

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

MAPS = ("elu1", "relu", "cosine")


SERIES = [
    AttentionSpec(denominator="none", norm="rms"),
    AttentionSpec(denominator="sum_plus_one"),
    AttentionSpec(clamp=0.5),
    AttentionSpec(series="taylor", order=0),
    AttentionSpec(series="taylor", order=1, denominator="none"),
    AttentionSpec(series="taylor", order=2),
    AttentionSpec(series="taylor", order=3, clamp=0.5, denominator="length"),
    AttentionSpec(series="taylor", order=10),
    AttentionSpec(series="power", order=1, denominator="none", scale=-0.5),
    AttentionSpec(series="power", order=2),
    AttentionSpec(series="power", order=4, clamp=0.5, denominator="none"),
]


# Each mask with each spec and each direction, and each spec with each direction.
MASKED = [
    (mask, (SHIFTED, BOUNDED)[i], causal)
    for number, mask in enumerate(
        ("padding", "full", "[1, H, 1, S]", "[B, 1, T, S]", "[T, 1]", "nothing")
    )
    for i, causal in enumerate((bool(number % 2), not number % 2))
]


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        *itertools.product((SHIFTED, BOUNDED), (True, False)),
        *zip(SERIES, itertools.cycle((True, False))),
    ],
    ids=lambda x: f"{x.series}-{x.order}" if isinstance(x, AttentionSpec) else str(x),
)
def test_series(spec: AttentionSpec, causal: bool, device: str) -> None:
    check(make_case(spec, causal=causal, shape=SMALL), device)


@pytest.mark.parametrize(("mask", "spec", "causal"), MASKED)
def test_masks(mask: str, spec: AttentionSpec, causal: bool, device: str) -> None:
    shape = Shape(batch=2, heads=2, kv_heads=1, queries=19, keys=34)
    case = make_case(spec, causal=causal, mask=mask, shape=shape)
    if case.mask is None:
        sizes = {"B": 2, "H": 2, "T": 19, "S": 34, "1": 1}
        size = [] if mask == "nothing" else [sizes[x] for x in mask.strip("[]").split(", ")]
        shown = torch.rand(size, generator=torch.Generator().manual_seed(1)) > 0.3
        case = dataclasses.replace(case, mask=shown & (mask != "nothing"))
    check(case, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    [SHIFTED, BOUNDED, AttentionSpec(series="taylor", order=4)],
    ids=["shifted", "bounded", "taylor"],
)
def test_types(spec: AttentionSpec, dtype: torch.dtype, device: str) -> None:
    check(make_case(spec, mask="padding", shape=SMALL), device, dtype)


@pytest.mark.parametrize(
    ("number", "causal", "dtype"),
    [(0, True, torch.float64), (1, True, torch.bfloat16), (2, False, torch.float32)],
)
@pytest.mark.parametrize("feature_map", MAPS)
def test_feature_maps(
    feature_map: str, number: int, causal: bool, dtype: torch.dtype, device: str
) -> None:
    """With vectors of hardly any length: that of cosine's gradients is 1e12, so they come apart."""
    shape, short = dataclasses.replace(SMALL, width=11), slice(20, 22)
    mask, fields = (  # each with each map and each type
        ("none", {"scale": "1/sqrt(d)"}),
        ("padding", {"series": "taylor", "order": 2}),
        ("full", {"series": "power", "order": 1, "norm": "rms"}),
    )[(number + MAPS.index(feature_map)) % 3]
    spec = AttentionSpec(feature_map=feature_map, **fields)
    case = make_case(spec, causal=causal, mask=mask, shape=shape)
    for name in "qk":
        case.tensors[name][:, :, short] *= torch.tensor([[0.0], [1e-13]])
    results = run(case, device, dtype)
    for name in "qk":
        apart = [{name: result[name][:, :, short].clone()} for result in results]
        assert_close(*apart, TOLERANCE[dtype], "short vectors")
        for result in results:
            result[name][:, :, short] = 0
    assert_close(*results, TOLERANCE[dtype])


def test_cosine_of_zeros_in_float16(device: str) -> None:
    """The type has no 1e-12 to divide by."""
    x = torch.zeros(1, 1, 3, 8, dtype=torch.float16, device=device)
    spec, v = AttentionSpec(feature_map="cosine"), torch.ones_like(x)
    for way in ("dense", "triton"):
        assert torch.equal(sr.attention(x, x, v, spec, form=way), v)


def test_float16_sums_may_leave_its_range(device: str) -> None:
    """Weights far beyond 65504, and gradients far below what float16 can tell from zero."""
    spec = AttentionSpec(series="power", order=4, scale=4.0)
    check(make_case(spec, shape=SMALL), device, torch.float16)


@pytest.mark.parametrize(("order", "size"), [(8, 1e-3), (12, 100.0)])
def test_powers_of_float16_queries_of_any_size(order: int, size: float, device: str) -> None:
    spec = AttentionSpec(series="power", order=order)
    q, k, v = torch.randn(3, 1, 1, 20, 16, device=device).unbind(0)
    q, k, v = (x.half() for x in (q * size, k * size, v))
    expected = sr.attention(q.double(), k.double(), v.double(), spec, form="dense")
    found = sr.attention(q, k, v, spec, form="triton").double()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize(("name", "mask"), [*zip(COMPUTED, itertools.cycle(MASKS))])
def test_decays_polynomials_and_windows(name: str, mask: str, device: str) -> None:
    """Keys of more tiles than a window has."""
    shape = Shape(batch=1, heads=2, kv_heads=1, queries=37, keys=54)
    check(make_case(COMPUTED[name], mask=mask, shape=shape), device)


@pytest.mark.parametrize(
    ("name", "decay", "dtype"),
    [
        (name, decay, (torch.float32, torch.float64)[(i + j) % 2])
        for i, name in enumerate(("forgetting", "forgetting_gate", "taylor_token", "window_decay"))
        for j, decay in enumerate((1e-3, 100.0, 1e5))
    ],
)
def test_strong_and_weak_decays(name: str, decay: float, dtype: torch.dtype, device: str) -> None:
    check(make_case(COMPUTED[name], shape=SMALL, decay=decay), device, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("forgetting", torch.float32),
        ("forgetting", torch.bfloat16),
        ("forgetting", torch.float16),
        ("power_token", torch.float16),
        ("cosine_token", torch.bfloat16),
        ("learned_polynomial_token", torch.float32),
        ("learned_polynomial_token", torch.bfloat16),
        ("learned_polynomial_token", torch.float16),
        ("window_decay", torch.float32),
        ("window_decay", torch.bfloat16),
    ],
)
def test_types_of_decays_polynomials_and_windows(
    name: str, dtype: torch.dtype, device: str
) -> None:
    check(make_case(COMPUTED[name], mask="padding", shape=SMALL), device, dtype)


def test_close_keys_far_from_the_first_one(device: str) -> None:
    """The running sums are -1e6, the differences between neighbours 1e-3."""
    many = dataclasses.replace(SMALL, keys=241)
    case = make_case(AttentionSpec(decay="token"), shape=many, decay=1e-3)
    case.tensors["log_decay"][:, :, :200] = -5e3
    check(case, device, torch.float32)


@pytest.mark.parametrize("name", ["window", "window_global", "window_decay"])
def test_tiles_before_a_window_are_not_visited(name: str, device: str) -> None:
    """Neither by queries nor by keys, but those of global keys are."""
    spec, tile = COMPUTED[name], 128 if device == "cuda" else 32
    length = 4 * tile
    q, k, v = (torch.randn(1, 1, length, 16, device=device) for _ in range(3))
    decays = {"log_decay": -torch.rand(1, 1, length, device=device)} if spec.decay != "none" else {}
    q.requires_grad_()
    values, upstream = v.clone(), torch.ones_like(v)
    values[:, :, tile : 2 * tile] = torch.nan
    out = sr.attention(q, k, values, spec, form="triton", **decays)
    (dq,) = torch.autograd.grad(out, q, upstream)
    for x in (out, dq):
        assert x[:, :, 3 * tile :].isfinite().all()
        assert x[:, :, tile : 2 * tile].isnan().all()
    upstream[:, :, 3 * tile :] = torch.nan
    out = sr.attention(q, k, v.requires_grad_(), spec, form="triton", **decays)
    (dv,) = torch.autograd.grad(out, v, upstream)
    assert dv[:, :, tile : 2 * tile].isfinite().all()
    assert dv[:, :, 3 * tile :].isnan().all()


def test_tiles_in_the_future_are_not_visited(device: str) -> None:
    half = 128 if device == "cuda" else 32
    q, k, v = (torch.randn(1, 1, 2 * half, 16, device=device) for _ in range(3))
    v[:, :, half:] = torch.nan
    q.requires_grad_()
    for spec in (SHIFTED, BOUNDED):
        out = sr.attention(q, k, v, spec, form="triton")
        grad = torch.autograd.grad(out[:, :, :half].sum(), q)[0]
        for x in (out, grad):
            assert x[:, :, :half].isfinite().all()


@pytest.mark.parametrize(
    ("window", "global_keys"),
    [(1, 1), (1, 40), (33, 1), (33, 40), (78, 1), (79, 1000), (10**12, 40)],
)
def test_windows(window: int, global_keys: int, device: str) -> None:
    """A tile or less, all but one key, all, more; after keys that no query sees."""
    spec = AttentionSpec(window=window, global_keys=global_keys, series="taylor", order=2)
    shape = Shape(batch=2, heads=1, kv_heads=1, queries=70, keys=79)
    case = make_case(spec, mask="padding", shape=shape)
    case.mask[-1, ..., :35] = False
    check(case, device)


def test_learned_polynomials_of_order_0_and_high_order(device: str) -> None:
    for order in (0, 1, 7, 8):
        spec = AttentionSpec(series="polynomial", order=order, clamp=0.7, denominator="length")
        check(make_case(spec, shape=SMALL), device)


# The interpreter takes the weights of hidden keys too.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("name", ["softmax", "softmax_plus_one"])
def test_large_scores_do_not_overflow(name: str, device: str) -> None:
    case = make_case(sr.variant(name), shape=SMALL, spread=8.0)
    assert_close(*run(case, device, torch.float32), 1e-3)


def test_queries_beyond_the_last_weigh_nothing(device: str) -> None:
    """Zeros there elu1 would take to ones, whose weights for long keys overflow."""
    case = make_case(AttentionSpec(feature_map="elu1"), causal=False, shape=SMALL)
    case.tensors["q"] *= 0.1
    case.tensors["k"] *= 20
    assert_close(*run(case, device, torch.float32), 1e-3)


@pytest.mark.parametrize("spec", [SHIFTED, BOUNDED], ids=["shifted", "bounded"])
def test_what_is_not_a_number_stays_seen(spec: AttentionSpec, device: str) -> None:
    q, k, v = (torch.randn(1, 1, 5, 16, device=device) for _ in range(3))
    q[0, 0, 2] = torch.nan
    out = sr.attention(q, k, v, spec, form="triton")
    assert out.isnan().any(-1).flatten().tolist() == [False, False, True, False, False]


@pytest.mark.slow
def test_the_kernels_compile(tmp_path: Path) -> None:
    """For two generations of GPUs, of which none need be here, within their memory on the chip."""
    pytest.importorskip("triton.backends.nvidia")
    code = """
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from softmax_rnn import AttentionSpec
from softmax_rnn.ops.forms.gpu import pairs as form

autotuned, sizes = form._autotuned, []
form._TILES = {size: tiles[-1:] for size, tiles in form._TILES.items()}

class Compiled:
    def __init__(self, *kernel):
        self.kernel = autotuned(*kernel)
    def __getitem__(self, grid):
        def launch(*arguments, **options):
            [kernel] = self.kernel.warmup(*arguments, grid=(1,), **options)
            sizes.append(kernel.metadata.shared)
        return launch

form._autotuned = Compiled
BOUNDED = AttentionSpec(feature_map="cosine", clamp=5.0, denominator="none")
for capability, shared, count in ((80, 163, 2), (90, 227, 1)):
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # what is compiled is kept by the device
        get_current_stream=lambda device=None: 0,
    ))
    for dtype, width, masked, spec in (
        (torch.bfloat16, 64, False, AttentionSpec(decay="token", window=20, global_keys=2)),
        (torch.float32, 256, True, AttentionSpec(series="polynomial", order=5, decay="head")),
        (torch.bfloat16, 200, True, AttentionSpec(series="taylor", order=4, feature_map="elu1")),
        (torch.float16, 128, False, BOUNDED),
    )[:count]:
        q, k, v = (torch.zeros(1, h, 50, width, dtype=dtype, requires_grad=True) for h in (2, 1, 1))
        mask = torch.ones(1, 1, 1, 50, dtype=torch.bool) if masked else None
        terms = {}
        if spec.decay != "none":
            terms["log_decay"] = torch.zeros(1, 1, 50, dtype=torch.float64, requires_grad=True)
        if spec.learned_coefficients:
            terms["coefficients"] = torch.ones(2, spec.order + 1, requires_grad=True)
        rows = form.triton(q, k, v, spec, causal=True, mask=mask, **terms)
        (rows.numerator.sum() + rows.weight_sum.sum()).backward()
        assert max(sizes) <= shared * 1024
print(len(sizes))
"""
    assert python(code, tmp_path) == "9\n"  # three kernels each
