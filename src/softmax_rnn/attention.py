"""One call for every attention of the paper: feature map, form, denominator, gate, norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.errors import unknown
from softmax_rnn.forms.blocked import blocked
from softmax_rnn.forms.dense import dense
from softmax_rnn.forms.fused import fused
from softmax_rnn.forms.fused import supports as fused_supports
from softmax_rnn.forms.row_sums import RowSums, compute_dtype, visible_count
from softmax_rnn.spec import AttentionSpec
from softmax_rnn.variants import resolve

NORM_EPS = 1e-5  # of the RMS and layer norms; the L2 norm leaves a zero vector as it is
# A row sum that can cross zero is kept at least this far from it.
SUM_GUARD = 1e-6


class Compute(Protocol):
    """The signature every form shares; see :func:`softmax_rnn.forms.dense.dense`."""

    def __call__(  # noqa: D102
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        *,
        causal: bool,
        mask: Tensor | None,
    ) -> RowSums: ...


class Form(NamedTuple):
    """A way of computing: the function, and what it can do on a type of device."""

    compute: Compute
    supports: Callable[[AttentionSpec, str], bool]


# In the order of preference of form="auto".
FORMS: dict[str, Form] = {
    "fused": Form(fused, fused_supports),
    "blocked": Form(blocked, lambda spec, device: True),
    "dense": Form(dense, lambda spec, device: True),
}

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "cosine": lambda x: F.normalize(x, dim=-1),
}


def forms(spec: AttentionSpec | str, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """The names of the forms that can compute ``spec`` on ``device``, the preferred one first."""
    spec, kind = resolve(spec), torch.device(device).type
    return tuple(name for name, form in FORMS.items() if form.supports(spec, kind))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    length_power: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    form: str = "auto",
) -> Tensor:
    """Attention as ``spec`` says: ``o_t = norm(g_out[t] * N_t / D_t)``, ``N_t = sum w(s) g_in v``.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, Hkv, S, D]; Hkv divides H (grouped queries).
        v: values [B, Hkv, S, E].
        spec: an :class:`AttentionSpec` or a variant's name (``"norm"``, ``"taylor:4"``).
        causal: query ``t`` sees keys up to ``t + S - T`` (the queries are the last T positions).
        mask: boolean, True = visible, broadcastable to [B, H, T, S]; with ``causal`` both apply.
            A row that sees no key has the numerator zero (and so the output, but for a
            ``norm_bias``).
        input_gate: in [0, 1], [B, Hkv, S]; multiplies the values (appendix E).
        output_gate: in [0, 1], [B, H, T]; multiplies the output (appendix E).
        length_power: [H], the exponent of the ``learned_length`` denominator.
        norm_weight: [E], scale of the ``rms`` and ``layer`` norms; ones if not given.
        norm_bias: [E], shift of the ``layer`` norm; zeros if not given.
        form: ``auto``, or one of :func:`forms` (the same result to rounding).

    Returns:
        The output, [B, H, T, E], in the dtype of ``q``. Sums accumulate in float32 for half types.

    Raises:
        ValueError: shapes, dtypes, devices, gates or form that do not fit, naming what would.
        OverflowError: an un-normalised exponential beyond the range of the dtype.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 128, 32).unbind(0)
        >>> attention(q, k, v, "norm").shape
        torch.Size([1, 4, 128, 32])
    """
    spec = resolve(spec)
    _check_tensors(q, k, v, causal)
    mask = _checked_mask(mask, q, k)
    batch, heads, queries, _ = q.shape
    kv_heads, keys, width = v.shape[1:]
    _check_extra("input_gate", input_gate, spec.input_gate, (batch, kv_heads, keys), q)
    _check_extra("output_gate", output_gate, spec.output_gate != "none", (batch, heads, queries), q)
    _check_extra("length_power", length_power, spec.denominator == "learned_length", (heads,), q)
    _check_extra("norm_weight", norm_weight, spec.norm in ("rms", "layer"), (width,), q, False)
    _check_extra("norm_bias", norm_bias, spec.norm == "layer", (width,), q, False)
    compute = _choose_form(form, spec, q.device)

    dtype = compute_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        feature_map = FEATURE_MAPS[spec.feature_map]
        if input_gate is not None:
            v = v * input_gate.unsqueeze(-1).to(v.dtype)
        sums = compute(feature_map(q), feature_map(k), v, spec, causal=causal, mask=mask)
        out, log_scale = sums.numerator.to(dtype), sums.log_scale
        if spec.row_sum is not None:
            if sums.weight_sum is not None:  # else the form has divided already
                out = out / _row_sum(sums.weight_sum, log_scale, spec).unsqueeze(-1)
            log_scale = None
        elif spec.denominator != "none":
            length = visible_count(queries, keys, causal, mask, q.device).clamp(min=1).to(dtype)
            if length_power is not None:
                length = length ** length_power.to(dtype).unsqueeze(-1)
            out = out / length.unsqueeze(-1)
        gate = None if output_gate is None else output_gate.unsqueeze(-1).to(dtype)
        if gate is not None and spec.output_gate == "before_norm":
            out = out * gate
        out = _norm(out, log_scale, spec, norm_weight, norm_bias)
        if gate is not None and spec.output_gate == "after_norm":
            out = out * gate
        return out.to(q.dtype)


def _row_sum(weight_sum: Tensor, log_scale: Tensor | None, spec: AttentionSpec) -> Tensor:
    """The row-sum denominator, in units of ``exp(log_scale)``, kept away from zero."""
    rule = spec.row_sum
    assert rule is not None
    unit = torch.ones_like(weight_sum) if log_scale is None else (-log_scale).exp()
    total = weight_sum.detach() if rule.detached else weight_sum
    if rule.offset:
        total = total + rule.offset * unit
    if rule.floor:
        total = total.maximum(rule.floor * unit)
    if spec.sign_definite:
        return total.masked_fill(total == 0, 1.0)  # no visible key, or no weight: 0 / 1
    return torch.where(total.abs() < SUM_GUARD, SUM_GUARD * _sign(total), total)


def _sign(x: Tensor) -> Tensor:
    """-1 below zero, else 1."""
    return torch.ones_like(x).masked_fill(x < 0, -1.0)


def _norm(
    x: Tensor,
    log_scale: Tensor | None,
    spec: AttentionSpec,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The norm of ``x * exp(log_scale)`` over its last dimension."""
    if spec.norm == "l2":
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / length.masked_fill(length == 0, 1.0)
    if spec.norm == "none":
        return x if log_scale is None else x * _exp_or_raise(log_scale).unsqueeze(-1)
    if spec.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    eps = x.new_tensor(NORM_EPS)
    if log_scale is not None:
        # The same eps for the true values: a norm ignores the scale, up to its eps.
        eps = eps * (-2 * log_scale).exp().unsqueeze(-1)
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)


def _exp_or_raise(log_scale: Tensor) -> Tensor:
    scale = log_scale.exp()
    if not torch.compiler.is_compiling() and not scale.isfinite().all():
        limit = torch.finfo(scale.dtype).max
        raise OverflowError(
            f"The un-normalised sum of exponentials overflows {scale.dtype}: the largest "
            f"log-sum-exp is {log_scale.max().item():.1f}, the limit {limit:.3g}. "
            "Give the spec a norm, a row-sum denominator, or a clamp (the paper's is 5)."
        )
    return scale


def _choose_form(form: str, spec: AttentionSpec, device: torch.device) -> Compute:
    if form == "auto":
        return FORMS[forms(spec, device)[0]].compute
    if form not in FORMS:
        raise unknown("form", form, ["auto", *FORMS])
    able = forms(spec, device)
    if form not in able:
        raise ValueError(
            f"form={form!r} cannot compute this spec on {device.type}; "
            f"those that can: {', '.join(able)}. The spec: {spec}."
        )
    return FORMS[form].compute


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], not {_shape(x)}.")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point dtype, not {x.dtype}.")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device; q has {q.dtype} on {q.device}, "
                f"{name} has {x.dtype} on {x.device}."
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {x.shape[0]}, q has {q.shape[0]}.")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has width {q.shape[3]}, k has {k.shape[3]}: they must be equal.")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"k and v must share heads and length; k is {_shape(k)}, v is {_shape(v)}."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"The {k.shape[1]} key/value heads must divide the {q.shape[1]} query heads."
        )
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"causal=True aligns the queries to the last keys, but there are {q.shape[2]} queries "
            f"and only {k.shape[2]} keys; use causal=False with a mask."
        )


def _checked_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask with four dimensions, each either 1 or that of [B, H, T, S]."""
    if mask is None:
        return None
    full = (*q.shape[:3], k.shape[2])
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean (True = visible), not {mask.dtype}.")
    if mask.device != q.device:
        raise ValueError(f"mask is on {mask.device}, q on {q.device}.")
    if mask.ndim > 4 or any(
        have not in (1, want)
        for have, want in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        raise ValueError(f"mask {_shape(mask)} cannot be broadcast to [B, H, T, S] = {list(full)}.")
    return mask[(None,) * (4 - mask.ndim)]


def _check_extra(
    name: str,
    value: Tensor | None,
    used: bool,
    shape: tuple[int, ...],
    q: Tensor,
    required: bool = True,
) -> None:
    """Check a tensor that only some specs take."""
    if value is None:
        if used and required:
            raise ValueError(f"This spec needs {name}, of shape {list(shape)}; none was given.")
        return
    if not used:
        raise ValueError(f"{name} was given, but this spec does not use one.")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {_shape(value)}.")
    if value.device != q.device:
        raise ValueError(f"{name} is on {value.device}, q on {q.device}.")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
