"""The Triton kernels against dense in float64: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import LAYOUTS, MASKS, WIDENED, Case, Shape, assert_close, make_case
from softmax_rnn.ops.forms import triton as form
from softmax_rnn.ops.forms.dense import dense
from softmax_rnn.ops.spec import AttentionSpec
from triton_device import forget_the_kernels

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}
KERNELS = "softmax_rnn.ops.forms.triton_kernels"
SMALL = Shape(batch=1, heads=2, kv_heads=1, queries=37, keys=41)
SHIFTED, BOUNDED = AttentionSpec(), AttentionSpec(clamp=0.5, denominator="none")
MAPS = ("elu1", "relu", "cosine")
COMPUTED = {name: spec for name, spec in WIDENED.items() if spec.decay != "channel"}


def run(case: Case, device: str, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """Output and every gradient, and what they should be, of inputs that the type holds exactly."""
    tensors = {name: x.to(dtype).double() for name, x in case.tensors.items()}
    case = dataclasses.replace(case, tensors=tensors, upstream=case.upstream.to(dtype).double())
    expected = case.run(sr.attention, form="dense")
    there = dataclasses.replace(
        case,
        tensors={name: x.to(device) for name, x in tensors.items()},
        mask=None if case.mask is None else case.mask.to(device),
        upstream=case.upstream.to(device),
    )
    found = {name: x.cpu() for name, x in there.run(sr.attention, dtype, form="triton").items()}
    return [found, expected]


def check(case: Case, device: str, dtype: torch.dtype = torch.float64) -> None:
    assert_close(*run(case, device, dtype), TOLERANCE[dtype], str(dtype))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    "spec",
    [
        SHIFTED,
        AttentionSpec(denominator="none", norm="rms"),
        AttentionSpec(denominator="sum_plus_one"),
        BOUNDED,
        AttentionSpec(clamp=0.5),
        AttentionSpec(series="taylor", order=0),
        AttentionSpec(series="taylor", order=1, denominator="none"),
        AttentionSpec(series="taylor", order=2),
        AttentionSpec(series="taylor", order=3, clamp=0.5, denominator="length"),
        AttentionSpec(series="taylor", order=10),
        AttentionSpec(series="power", order=1, denominator="none", scale=-0.5),
        AttentionSpec(series="power", order=2),
        AttentionSpec(series="power", order=4, clamp=0.5, denominator="none"),
    ],
    ids=lambda spec: f"{spec.series}-{spec.order}-{spec.clamp}-{spec.denominator}",
)
def test_series(spec: AttentionSpec, causal: bool, device: str) -> None:
    check(make_case(spec, causal=causal, shape=SMALL), device)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("spec", [SHIFTED, BOUNDED], ids=["shifted", "bounded"])
@pytest.mark.parametrize(
    "mask", ["padding", "full", "[1, H, 1, S]", "[B, 1, T, S]", "[T, 1]", "nothing"]
)
def test_masks(mask: str, spec: AttentionSpec, causal: bool, device: str) -> None:
    shape = Shape(batch=2, heads=2, kv_heads=1, queries=19, keys=34)
    case = make_case(spec, causal=causal, mask=mask, shape=shape)
    if case.mask is None:
        sizes = {"B": 2, "H": 2, "T": 19, "S": 34, "1": 1}
        size = [] if mask == "nothing" else [sizes[x] for x in mask.strip("[]").split(", ")]
        shown = torch.rand(size, generator=torch.Generator().manual_seed(1)) > 0.3
        case = dataclasses.replace(case, mask=shown & (mask != "nothing"))
    check(case, device)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=2, heads=4, kv_heads=2, queries=5, keys=7, width=24, value_width=40),
        Shape(batch=1, heads=1, kv_heads=1, queries=1, keys=33, width=16, value_width=16),
        Shape(batch=1, heads=1, kv_heads=1, queries=1, keys=1, width=1, value_width=1),
        Shape(batch=1, heads=1, kv_heads=1, queries=64, keys=64, width=17, value_width=2),
        Shape(batch=1, heads=1, kv_heads=1, queries=16, keys=80, width=128, value_width=256),
    ],
    ids=["widths", "decode", "tiny", "whole_tiles", "wide"],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_shapes(shape: Shape, causal: bool, device: str) -> None:
    for spec in (SHIFTED, BOUNDED):
        check(make_case(spec, causal=causal, shape=shape), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    case = make_case(SHIFTED, shape=Shape(batch=1, queries=20, keys=20))
    layouts = dict.fromkeys(["q", "k", "v", "upstream"], layout)
    check(dataclasses.replace(case, layouts=layouts), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    [SHIFTED, BOUNDED, AttentionSpec(series="taylor", order=4)],
    ids=["shifted", "bounded", "taylor"],
)
def test_types(spec: AttentionSpec, dtype: torch.dtype, device: str) -> None:
    check(make_case(spec, mask="padding", shape=SMALL), device, dtype)


@pytest.mark.parametrize(
    ("causal", "dtype"),
    [(True, torch.float64), (True, torch.bfloat16), (False, torch.float32)],
)
@pytest.mark.parametrize("feature_map", MAPS)
def test_feature_maps(feature_map: str, causal: bool, dtype: torch.dtype, device: str) -> None:
    """With vectors of hardly any length: that of cosine's gradients is 1e12, so they come apart."""
    shape, short = dataclasses.replace(SMALL, width=11), slice(20, 22)
    for mask, spec in (
        ("none", AttentionSpec(feature_map=feature_map, scale="1/sqrt(d)")),
        ("padding", AttentionSpec(feature_map=feature_map, series="taylor", order=2)),
        ("full", AttentionSpec(feature_map=feature_map, series="power", order=1, norm="rms")),
    ):
        case = make_case(spec, causal=causal, mask=mask, shape=shape)
        for name in "qk":
            case.tensors[name][:, :, short] *= torch.tensor([[0.0], [1e-13]])
        results = run(case, device, dtype)
        for name in "qk":
            apart = [{name: result[name][:, :, short].clone()} for result in results]
            assert_close(*apart, TOLERANCE[dtype], "short vectors")
            for result in results:
                result[name][:, :, short] = 0
        assert_close(*results, TOLERANCE[dtype], spec.series)


def test_cosine_of_zeros_in_float16(device: str) -> None:
    """The type has no 1e-12 to divide by."""
    x = torch.zeros(1, 1, 3, 8, dtype=torch.float16, device=device)
    spec, v = AttentionSpec(feature_map="cosine"), torch.ones_like(x)
    for way in ("dense", "triton"):
        assert torch.equal(sr.attention(x, x, v, spec, form=way), v)


@pytest.mark.parametrize("feature_map", MAPS)
def test_features_are_not_kept_for_the_backward(feature_map: str, device: str) -> None:
    q, k, v = (torch.randn(1, 2, 20, n, device=device, requires_grad=True) for n in (8, 8, 6))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        sr.attention(q, k, v, AttentionSpec(feature_map=feature_map), form="triton")
    assert {x.data_ptr() for x in kept if x.shape[-1] == 8} == {q.data_ptr(), k.data_ptr()}


def test_float16_sums_may_leave_its_range(device: str) -> None:
    """Weights far beyond 65504, and gradients far below what float16 can tell from zero."""
    spec = AttentionSpec(series="power", order=4, scale=4.0)
    check(make_case(spec, shape=SMALL), device, torch.float16)


def test_more_queries_than_keys(device: str) -> None:
    shape = dataclasses.replace(SMALL, queries=50, keys=9)
    check(make_case(BOUNDED, causal=False, shape=shape), device)


@pytest.mark.parametrize(("name", "mask"), zip(COMPUTED, itertools.cycle(MASKS), strict=False))
def test_decays_polynomials_and_windows(name: str, mask: str, device: str) -> None:
    """Keys of more tiles than a window has."""
    shape = Shape(batch=1, heads=2, kv_heads=1, queries=37, keys=54)
    check(make_case(COMPUTED[name], mask=mask, shape=shape), device)


@pytest.mark.parametrize("decay", [1e-3, 100.0, 1e5])
@pytest.mark.parametrize("name", ["forgetting", "forgetting_gate", "taylor_token", "window_decay"])
def test_strong_and_weak_decays(name: str, decay: float, device: str) -> None:
    case = make_case(COMPUTED[name], shape=SMALL, decay=decay)
    check(case, device)
    check(case, device, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["forgetting", "power_token", "cosine_token", "learned_polynomial_token", "window_decay"],
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


def test_gradients_that_no_one_asks_for(device: str) -> None:
    """Decays and coefficients that are constants."""
    case = make_case(COMPUTED["learned_polynomial_token"], shape=SMALL)
    there = {name: x.to(device) for name, x in case.tensors.items()}
    there["q"].requires_grad_()
    grads = [
        torch.autograd.grad(sr.attention(spec=case.spec, form=way, **there).sum(), there["q"])[0]
        for way in ("triton", "dense")
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sums", ["numerator", "weight_sum"])
@pytest.mark.parametrize("spec", [SHIFTED, BOUNDED], ids=["shifted", "bounded"])
def test_gradients_of_one_sum_alone(spec: AttentionSpec, sums: str, device: str) -> None:
    case = make_case(spec, shape=SMALL)
    upstream = case.upstream if sums == "numerator" else case.upstream[..., 0]
    results = []
    for compute, place in ((form.triton, device), (dense, "cpu")):
        inputs = [case.tensors[name].to(place).requires_grad_() for name in "qkv"]
        rows = compute(*inputs, spec, causal=True, mask=None)
        found = getattr(rows, sums)
        if rows.log_scale is not None:
            scale = rows.log_scale.exp()
            found = found * (scale.unsqueeze(-1) if sums == "numerator" else scale)
        grads = torch.autograd.grad(found, inputs, upstream.to(place), materialize_grads=True)
        tensors = dict(zip("nqkv", (found.detach(), *grads), strict=True))
        results.append({name: x.cpu() for name, x in tensors.items()})
    assert_close(*results, 1e-10)


def test_a_row_that_sees_no_key(device: str) -> None:
    x = torch.randn(1, 1, 3, 16, device=device)
    hidden = torch.zeros(1, 1, 1, 3, dtype=torch.bool, device=device)
    for spec in (SHIFTED, BOUNDED):
        rows = form.triton(x, x, x, spec, causal=True, mask=hidden)
        assert all(not y.any() for y in rows if y is not None)


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


@pytest.mark.parametrize("spec", [SHIFTED, BOUNDED], ids=["shifted", "bounded"])
def test_what_is_not_a_number_stays_seen(spec: AttentionSpec, device: str) -> None:
    q, k, v = (torch.randn(1, 1, 5, 16, device=device) for _ in range(3))
    q[0, 0, 2] = torch.nan
    out = sr.attention(q, k, v, spec, form="triton")
    assert out.isnan().any(-1).flatten().tolist() == [False, False, True, False, False]


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


def test_inputs_stay_as_they_were(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 20, 8, device=device, requires_grad=True) for _ in range(3))
    before = [x.detach().clone() for x in (q, k, v)]
    sr.attention(q, k, v, "softmax", form="triton").sum().backward()
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_what_is_beyond_the_kernels_is_named(device: str) -> None:
    x, y = torch.zeros(1, 1, 4, 500, dtype=torch.float64, device=device).split((300, 200), -1)
    with pytest.raises(ValueError, match=f"cannot compute heads of width 300 on {device}"):
        sr.attention(x, x, x, "softmax", form="triton")
    with pytest.raises(ValueError, match="cannot compute float64 cosines of width 200"):
        sr.attention(y, y, y, AttentionSpec(feature_map="cosine"), form="triton")
    assert "triton" not in sr.forms("taylor:65", device)


def test_torch_compile_leaves_the_kernels_alone(device: str) -> None:
    q, k, v = (torch.randn(1, 1, 20, 8, device=device, requires_grad=True) for _ in range(3))

    def attend() -> Tensor:
        return sr.attention(q, k, v, "clamped", form="triton")

    found, expected = torch.compile(attend, backend="aot_eager")(), attend()
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (found, expected)))


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("gate", "taylor:4", "linear_elu", "norm_rms"):
        assert "triton" not in sr.forms(name)
        on_gpu = sr.forms(name, "cuda")
        assert on_gpu.index("triton") < on_gpu.index("blocked")
    assert sr.forms("gate", "cuda")[0] == "triton"
    for name, spec in WIDENED.items():
        assert ("triton" in sr.forms(spec, "cuda")) == (name in COMPUTED)
    assert sr.forms("softmax_plus_one", "cuda")[:2] == ("fused", "triton")


def test_auto_leaves_the_interpreter_to_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "triton" in sr.forms("clamped")
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    expected = sr.attention(q, q, q, "clamped", form="blocked")
    forget_the_kernels()
    assert torch.equal(sr.attention(q, q, q, "clamped"), expected)
    assert KERNELS not in sys.modules


def python(code: str, tmp_path: Path) -> str:
    """What a Python of its own prints."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "TRITON_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_kernels_are_imported_when_used(tmp_path: Path) -> None:
    """And the package does without Triton, which PyTorch imports if it is there."""
    code = f"""
import sys
sys.modules["triton"] = None
import torch, softmax_rnn
x = torch.zeros(1, 1, 3, 4)
softmax_rnn.attention(x, x, x, "clamped")
print({KERNELS!r} in sys.modules)
"""
    assert python(code, tmp_path) == "False\n"


def test_the_kernels_compile(tmp_path: Path) -> None:
    """For two generations of GPUs, of which none need be here, within their memory on the chip."""
    pytest.importorskip("triton.backends.nvidia")
    code = """
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from softmax_rnn import AttentionSpec
from softmax_rnn.ops.forms import triton as form

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
for capability, shared, count in ((80, 163, 5), (90, 227, 2)):
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # what is compiled is kept by the device
        get_current_stream=lambda device=None: 0,
    ))
    for dtype, width, masked, spec in (
        (torch.float32, 256, True, AttentionSpec(series="polynomial", order=5, decay="head")),
        (torch.bfloat16, 64, False, AttentionSpec(decay="token", window=20, global_keys=2)),
        (torch.bfloat16, 64, False, AttentionSpec(clamp=5.0, denominator="none")),
        (torch.bfloat16, 200, True, AttentionSpec(series="taylor", order=4, feature_map="elu1")),
        (torch.float16, 128, False, AttentionSpec(feature_map="cosine")),
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
    assert python(code, tmp_path) == "21\n"  # three kernels each
