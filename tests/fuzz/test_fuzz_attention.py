"""The operation on anything: any specification, layout, scale, mask and type, in every form.

A result is held to float64 by what rounding can make of it: the sizes of what is summed, times the
machine epsilon. Rows of which rounding leaves nothing need only be finite.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import event, given, note
from hypothesis import strategies as st
from torch import Tensor

import softmax_rnn as sr
from cases import MASKS, Case, Shape, assert_close, make_case
from fuzzing import time_limit
from softmax_rnn.ops.decay import differences, per_key_decay
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.row_sums import compute_dtype, visible, visible_count
from softmax_rnn.ops.norms import NORM_EPS
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec
from strategies import layouts, specs, widths

DTYPES = [torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16]
SIZES = [1e-8, 1e-3, 1.0, 1.0, 30.0, 1e4]
# Rounding errors of some sums and products, in units of the largest possible one.
ERRORS = 32.0


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What an example is made of; its ``repr`` is code, so that it can be pasted."""

    spec: AttentionSpec
    dtype: torch.dtype
    shape: Shape
    causal: bool
    backward: bool
    mask: str
    seed: int
    decay: float
    gate_per_channel: bool
    sizes: dict[str, float]
    unlike: bool  # tokens are of unlike sizes
    layout: dict[str, str]

    def case(self) -> Case:
        """Inputs that the type holds exactly."""
        case = make_case(
            self.spec,
            causal=self.causal,
            backward=self.backward,
            mask=self.mask,
            shape=self.shape,
            seed=self.seed,
            decay=self.decay,
            gate_per_channel=self.gate_per_channel,
        )
        tensors, most = dict(case.tensors), 1e3 if self.dtype == torch.float16 else math.inf
        if self.unlike:
            spread = torch.linspace(-3, 3, self.shape.keys, dtype=torch.float64)
            order = torch.randperm(len(spread), generator=torch.Generator().manual_seed(0))
            tensors["k"] = tensors["k"] * 10 ** spread[order].unsqueeze(-1)
        for name, x in tensors.items():
            x = x * min(self.sizes.get(name, 1.0), most)
            tensors[name] = x.to(self.dtype).double().clamp(-most * 10, most * 10)
        upstream = case.upstream.to(self.dtype).double()
        return dataclasses.replace(case, tensors=tensors, upstream=upstream, layouts=self.layout)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Sizes of one sequence."""
    queries, past = draw(st.integers(1, 40)), draw(st.integers(0, 9))
    heads = draw(st.sampled_from([(2, 1), (2, 2), (3, 1)]))
    outside_width = draw(st.sampled_from([None, 6, 1]))
    return Shape(1, *heads, queries, queries + past, *draw(widths()), outside_width)


examples = st.builds(
    Drawn,
    spec=specs(),
    dtype=st.sampled_from(DTYPES),
    shape=shapes(),
    causal=st.booleans(),
    backward=st.booleans(),
    mask=st.sampled_from([*MASKS, "gaps"]),
    seed=st.integers(0, 999),
    decay=st.sampled_from([1e-8, 1e-3, 0.1, 1.0, 100.0, 1e4]),
    gate_per_channel=st.booleans(),
    sizes=st.fixed_dictionaries(
        {name: st.sampled_from(SIZES) for name in ("q", "k", "v", "outside_q", "outside_k")}
    ),
    unlike=st.booleans(),
    layout=layouts(),
)


def series_and_doubts(
    spec: sr.AttentionSpec, extras: dict[str, Tensor], scores: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights of scores, and what their rounding errors are in proportion to."""
    coefficients = None
    if spec.learned_coefficients:
        coefficients = extras["coefficients"][:, None, None]
    series = PowerSeries.from_spec(spec, coefficients)
    weights = series(scores)
    if series.coefficients is None:
        return weights, weights * (1 + sizes)
    powers = [(n + 1) * abs(a) for n, a in enumerate(series.coefficients)]
    doubts = PowerSeries(tuple(powers))(sizes)
    return weights, doubts if spec.scale_free else doubts + 1e-30  # what is smaller may vanish


def scores_and_sizes(
    spec: sr.AttentionSpec, q: Tensor, k: Tensor, fade: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, the sizes of what they sum, and the least fading of their parts."""
    phi, scale = FEATURE_MAPS[spec.feature_map], spec.score_scale(q.shape[-1])
    q, k = phi(q), phi(k).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    if spec.decay != "channel":
        scores = scale * q @ k.mT
        sizes = abs(scale) * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2)
    else:
        channels = q.unsqueeze(-2) * k.unsqueeze(-3) * fade.exp()
        sizes = abs(scale) * (channels.abs() * (1 + fade.abs())).sum(-1)
        scores, fade = scale * channels.sum(-1), fade.amin(-1)
    return scores if spec.clamp is None else scores.clamp(max=spec.clamp), sizes, fade


def errors(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What rounding can make of the outputs.

    Weights are summed in the type that sums accumulate in, weights and values may be in ``dtype``.

    Returns:
        [B, H, T], the error of the length of a row of outputs; [], the largest sum of sizes.
    """
    spec, extras = case.spec, case.tensors
    eps = ERRORS * torch.finfo(compute_dtype(dtype)).eps
    q, k, v = (case.laid_out(name, extras[name]) for name in "qkv")
    groups = q.shape[1] // k.shape[1]
    v = v.repeat_interleave(groups, dim=1)
    fades = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)  # log of what a decay leaves
    if "log_decay" in extras:
        decay = per_key_decay(extras["log_decay"], case.tensors["k"], case.mask)
        fades = differences(decay.repeat_interleave(groups, dim=1), q.shape[2])
        if not case.causal:  # later keys fade as earlier ones of the reversed sequence
            later = torch.cat([decay[:, :, 1:], torch.zeros_like(decay[:, :, :1])], dim=2)
            if (given := extras.get("backward_log_decay")) is not None:
                later = per_key_decay(given, case.tensors["k"], case.mask)
            back = differences(later.flip(2).repeat_interleave(groups, dim=1), q.shape[2])
            fades = fades + back.flip(2, 3)
    scores, sizes, fade = scores_and_sizes(spec, q, k, fades)
    if spec.scale_free:  # else powers of small scores, of faded keys as well, vanish here
        row = sizes.amax(-1, keepdim=True).clamp(max=1.0)
        scores, sizes = (x / row.masked_fill(row == 0, 1.0) for x in (scores, sizes))
    weights, doubts = series_and_doubts(spec, extras, scores, sizes)
    if series_and_window := spec.outside == "series":
        near = sr.AttentionSpec(feature_map=spec.feature_map)
        ends = spec.window, spec.global_keys
        window = visible(*scores.shape[2:], case.causal, case.mask, q.device, *ends)
        scale = extras["outside_scale"][:, None, None]
        inside = series_and_doubts(near, extras, scores, sizes)
        if "outside_q" in extras:
            far = scores_and_sizes(spec, extras["outside_q"], extras["outside_k"], fades)
            weights, doubts = series_and_doubts(spec, extras, *far[:2])
        weights, doubts = (
            torch.where(window, x, y * scale)
            for x, y in zip(inside, (weights, doubts), strict=True)
        )
    if spec.series == "exp" or series_and_window:
        if spec.feature_map in ("elu1", "cosine"):  # the fused kernels take features in dtype
            doubts = doubts * max(1.0, torch.finfo(dtype).eps / eps)
        doubts[sizes > 1e6] = math.inf
        doubts[scores.abs().amax(-1) > 600] = math.inf  # weights beyond float64
    if spec.decay != "channel":
        weights, doubts = weights * fade.exp(), doubts * fade.exp() * (1 + fade.abs())
    if spec.decay != "none":  # the smallest weights may vanish
        doubts = torch.where(fade < -60, doubts.abs() + weights.abs() / eps, doubts)
    window = (spec.hiding_window, spec.global_keys)
    shown = visible(q.shape[2], k.shape[2], case.causal, case.mask, q.device, *window)
    if shown is not None:
        weights, doubts = (x.masked_fill(~shown, 0.0) for x in (weights, doubts))
    if "input_gate" in extras:
        v = v * extras["input_gate"].repeat_interleave(groups, dim=1).unsqueeze(-1)
    rounded = eps * doubts + 4 * torch.finfo(dtype).eps * weights.abs()
    least = v.shape[-1] * torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    out, error = weights @ v, (rounded @ v.norm(dim=-1).unsqueeze(-1)).squeeze(-1)
    error = error + least * weights.abs().sum(-1)
    weight_sum, doubt = weights.sum(-1), rounded.sum(-1)
    largest = torch.stack([error.max(), doubt.max()]).max() / eps
    if spec.row_sum is not None:
        total = weight_sum + spec.row_sum.offset
        if spec.row_sum.sink:
            total = total + extras["sink"].unsqueeze(-1).exp()
        if spec.row_sum.floor:
            total = total.clamp(min=spec.row_sum.floor)
        total = total.masked_fill(total == 0, 1.0)
        out = out / total.unsqueeze(-1)
        error = (error + out.norm(dim=-1) * doubt) / total.abs()
    elif spec.denominator != "none":
        count = visible_count(q.shape[2], k.shape[2], case.causal, case.mask, q.device, *window)
        count = count.clamp(min=1).double()
        if spec.denominator == "learned_length":
            count = count ** extras["length_power"].unsqueeze(-1)
        out, error = out / count.unsqueeze(-1), error / count
    if "output_gate" in extras and (spec.norm == "none" or spec.output_gate == "before_norm"):
        gate = extras["output_gate"]
        gate = gate if gate.ndim == 4 else gate.unsqueeze(-1)
        out, error = out * gate, error * gate.amax(-1)
    if spec.norm != "none":
        if spec.norm == "layer":
            error = error + eps * out.norm(dim=-1)
            out = out - out.mean(-1, keepdim=True)
        squares = out.square().sum(-1)
        if spec.norm != "l2":
            squares = squares / out.shape[-1] + NORM_EPS[spec.norm]
        most = float(extras.get("norm_weight", torch.ones(1)).abs().max())
        error = 2 * max(most, 1.0) * error / squares.sqrt() + 4 * torch.finfo(dtype).eps
    return error, largest


@given(examples)
def test_any_attention(drawn: Drawn) -> None:
    case, dtype = drawn.case(), drawn.dtype
    error, largest = errors(case, dtype)
    try:
        expected = case.run(sr.attention, form="dense")
    except OverflowError:
        event("beyond float64")
        return
    error = error.nan_to_num(nan=math.inf)
    size = expected["out"].norm(dim=-1)
    error = error + 2 * torch.finfo(dtype).eps * size + torch.finfo(dtype).tiny
    settled = error < 0.1 * size
    sizes = {
        name: f"{list(x.shape)}, at most {x.abs().max():.3g}" for name, x in case.tensors.items()
    }
    note(f"{dtype}: {sizes}")
    event(f"settled: {'most' if settled.float().mean() > 0.9 else 'not most'}")
    for form in ["auto", *case.forms_of(dtype)]:
        with time_limit():
            try:
                found = case.run(sr.attention, dtype, form=form)
            except OverflowError as error_told:
                wide, narrow = (torch.finfo(x).max for x in (compute_dtype(dtype), dtype))
                if largest < 1e-6 * wide and size.max() < 0.1 * narrow:
                    pytest.fail(f"{form}: {error_told}")
                event("overflow")
                continue
        out = found["out"].double()
        assert out.isfinite().all(), f"{form}: not finite"
        wrong = settled & ((out - expected["out"]).norm(dim=-1) > error)
        if wrong.any():
            row = tuple(wrong.nonzero()[0].tolist())
            pytest.fail(
                f"{form}: row {row} is {out[row].tolist()}, not {expected['out'][row].tolist()}, "
                f"within {float(error[row]):.2g}"
            )
        exact = (error < 1e-8 * size).all() and size.min() > 1e-6
        cancels = case.spec.feature_map == "cosine" and case.tensors["q"].shape[-1] == 1
        if dtype == torch.float64 and exact and not cancels:  # of numbers the unit vectors are +-1
            assert_close(found, expected, 1e-6, form)
            event("gradients compared")
