"""A window and a series under one denominator: exp for the last keys, a series for all others.

The keys inside the window and those outside are two attentions, which any form computes. Outside,
query ``t`` sees the keys up to ``t - window``: causal attention to keys shifted by the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import Recent, State


def window_and_series(
    compute: Callable[..., RowSums],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None,
    log_decay: Tensor | None = None,
    coefficients: Tensor | None = None,
    outside_scale: Tensor | None = None,
    state: State | None = None,
    keep_state: bool = False,
) -> tuple[RowSums, Recent | None]:
    """The sums over both parts, and the keys of the last window if a state is kept.

    ``compute(spec, q, k, v, ...)`` computes the sums of one part.
    """
    assert spec.window is not None
    q, k = (FEATURE_MAPS[spec.feature_map](x) for x in (q, k))
    if q.dtype != v.dtype:  # features of half types are wider
        v = v.to(q.dtype)
    new = _Keys(k, v, mask, log_decay)
    if state is None:
        near, far = new, new.shifted(spec.window)
    else:
        assert state.recent is not None
        near = new.after(state.recent)
        far = near.part(slice(q.shape[2]))
    inside, outside = _parts(spec, q.shape[-1])
    window_sums = compute(inside, q, near.k, near.v, mask=near.mask, log_decay=near.log_decay)
    faded = None  # the decay over the window of each query
    if near.log_decay is not None:
        total = near.log_decay.cumsum(2)
        faded = (total - _shifted(total, spec.window)).to(compute_dtype(q.dtype)).exp()
        faded = faded[:, :, faded.shape[2] - q.shape[2] :]
        faded = faded.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        if spec.decay == "channel":
            q, faded = q * faded, None
    series_sums = compute(
        *(outside, q, far.k, far.v),
        mask=far.mask,
        log_decay=far.log_decay,
        coefficients=coefficients,
        state=state,
        keep_state=keep_state,
    )
    factor = faded
    if outside_scale is not None:
        scale = outside_scale.to(compute_dtype(q.dtype)).unsqueeze(-1)
        factor = scale if factor is None else scale * factor
    recent = near.last(spec.window) if keep_state else None
    return _joined(window_sums, series_sums, factor), recent


class _Keys(NamedTuple):
    """Keys [B, Hkv, S, D], their values, mask and log decays (0 for hidden keys)."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    log_decay: Tensor | None

    def shifted(self, count: int) -> _Keys:
        """These keys, ``count`` positions later; as many in all, the first ``count`` hidden."""
        keys = self.k.shape[2]
        mask = self.k.new_ones(1, 1, 1, keys, dtype=torch.bool) if self.mask is None else self.mask
        mask = _shifted(mask.expand(*mask.shape[:-1], keys).transpose(2, 3), count).transpose(2, 3)
        decay = None if self.log_decay is None else _shifted(self.log_decay, count)
        return _Keys(_shifted(self.k, count), _shifted(self.v, count), mask, decay)

    def part(self, keys: slice) -> _Keys:
        """Some of the keys; the mask is per key."""
        k, v, mask, decay = self
        mask = None if mask is None else mask[..., keys]
        decay = None if decay is None else decay[:, :, keys]
        return _Keys(k[:, :, keys], v[:, :, keys], mask, decay)

    def after(self, recent: Recent) -> _Keys:
        """The recent keys, and after them these; the mask is per key."""
        batch, _, keys, _ = self.k.shape
        shown = self.k.new_ones(1, dtype=torch.bool) if self.mask is None else self.mask
        shown = shown.expand(batch, 1, 1, keys)
        decay = self.log_decay
        if decay is not None:
            assert recent.log_decay is not None
            decay = torch.cat([recent.log_decay, decay], dim=2)
        return _Keys(
            torch.cat([recent.k, self.k], dim=2),
            torch.cat([recent.v, self.v], dim=2),
            torch.cat([recent.visible[:, None, None], shown], dim=3),
            decay,
        )

    def last(self, count: int) -> Recent:
        """The last ``count`` keys; hidden ones before the first."""
        k, v, mask, decay = self.part(slice(-count, None))
        missing, batch = count - k.shape[2], len(k)
        shown = k.new_ones(1, dtype=torch.bool) if mask is None else mask
        shown = shown.expand(batch, 1, 1, k.shape[2]).reshape(batch, -1)
        k, v = (F.pad(x, (0, 0, missing, 0)) for x in (k, v))
        if decay is not None:
            decay = F.pad(decay, (*(0, 0) * (decay.ndim - 3), missing, 0))
        return Recent(k, v, F.pad(shown, (missing, 0)), decay)


def _shifted(x: Tensor, count: int) -> Tensor:
    """``x`` [B, H, S] or [B, H, S, D] with ``count`` zeros before it, cut to its length."""
    return F.pad(x, (*(0, 0) * (x.ndim - 3), count, 0))[:, :, : x.shape[2]]


def _parts(spec: AttentionSpec, width: int) -> tuple[AttentionSpec, AttentionSpec]:
    """The specs inside and outside the window, for mapped queries and keys."""
    plain: dict[str, Any] = {"feature_map": "identity", "scale": spec.score_scale(width)}
    outside = replace(spec, **plain, window=None, global_keys=0, outside="hidden")
    exp: dict[str, Any] = {"series": "exp", "order": None, "coefficients": None}
    # This denominator needs the sum of the weights itself, not only quotients.
    rest: dict[str, Any] = {"denominator": "sum_plus_one", "epsilon": 0.0, "floor": 0.0}
    return replace(spec, **plain, **exp, **rest, norm="none", outside="hidden"), outside


def _joined(near: RowSums, far: RowSums, factor: Tensor | None) -> RowSums:
    """The sums of both; those of ``far`` times ``factor``, broadcastable to [B, H, T]."""
    assert near.weight_sum is not None
    zero = torch.zeros_like(near.weight_sum)
    scales = [zero if part.log_scale is None else part.log_scale for part in (near, far)]
    factor = torch.ones_like(zero) if factor is None else factor
    empty = (far.numerator == 0).all(-1)
    if far.weight_sum is not None:
        empty = empty & (far.weight_sum == 0)
    empty = empty | (factor == 0)
    # If there is no key outside the window, the weights inside may be of any size.
    largest = torch.where(empty, scales[0], scales[0].maximum(scales[1]))
    ours, theirs = ((scale - largest).clamp(max=0.0).exp() for scale in scales)
    theirs = theirs * factor
    numerator = near.numerator * ours.unsqueeze(-1) + far.numerator * theirs.unsqueeze(-1)
    weight_sum = None
    if far.weight_sum is not None:
        weight_sum = near.weight_sum * ours + far.weight_sum * theirs
    noise = None if far.noise is None else far.noise * theirs.detach().abs()
    return RowSums(numerator, weight_sum, largest, far.state, noise)
