"""A window and a series under one denominator: exp for the last keys, a series for all others.

The first keys may belong to the window, too. The keys inside and those outside are two attentions,
which any form computes. Outside, query ``t`` sees the keys up to ``t - window``: causal attention
to keys shifted by the window. If it is not causal, it sees those from ``t + window`` on as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.decay import faded
from softmax_rnn.ops.directions import after
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.row_sums import (
    RowSums,
    compute_dtype,
    first_positions,
    first_visible,
    joined,
    no_data,
)
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.padding import hidden_first, taken
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import KeptKeys, require_memory_to_keep


def window_and_series(
    compute: Callable[[Call], RowSums], call: Call, packed: bool = False
) -> tuple[RowSums, tuple[KeptKeys | None, KeptKeys | None]]:
    """The sums over both parts; the recent and first keys of the next state, if it is kept.

    ``compute`` computes the sums of one part. ``packed`` tokens are in an order in which hidden
    ones come first, those of a state included, so that they count in no window.
    """
    spec, state, v = call.spec, call.state, call.v
    assert spec.window is not None
    phi = FEATURE_MAPS[spec.feature_map]
    far_q = phi(call.q if call.outside_q is None else call.outside_q)
    far_k = None if call.outside_k is None else phi(call.outside_k)
    q, k = phi(call.q), phi(call.k)
    if q.dtype != v.dtype:  # features of half types are wider
        v = v.to(q.dtype)
    near = _Keys(k, v, call.mask, call.log_decay, far_k)
    if state is not None:
        assert state.recent is not None
        near = near.after(state.recent)
        if packed and (order := hidden_first(near.shown_keys)) is not None:
            shown = taken(near.shown_keys, order, dim=1)[:, None, None]
            near = near.each(lambda _, x: taken(x, order), shown)
    inside, outside = parts_of(spec, q.shape[-1], far_q.shape[-1])
    unfaded_q, fading = far_q, None  # the decay over the window of each query
    if near.log_decay is not None:
        total = near.log_decay.cumsum(2)
        fading = (total - _shifted(total, spec.window)).to(compute_dtype(q.dtype))
        fading = fading[:, :, fading.shape[2] - q.shape[2] :]
        fading = fading.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        if spec.decay == "channel":
            far_q, fading = far_q * fading.exp(), None
    recent = None
    if call.return_state:
        require_memory_to_keep(spec, [near.k, near.v, near.log_decay, near.outside_k])
        recent = near.last(spec.window)
    far, first = near, None
    if spec.global_keys:
        if state is not None:
            assert state.first is not None
            near = near.after_first(state.first)
        among = first_visible(near.mask, near.k.shape[2], spec.global_keys, k.device)
        if state is not None and not k.shape[2]:  # no key has left the window
            first = state.first
        elif call.return_state:
            first = near.first(spec.global_keys, among, spec.window)
        far = far.without(among[:, near.k.shape[2] - far.k.shape[2] :])
    far = far.shifted(spec.window) if state is None else far.part(slice(k.shape[2]))
    decays: dict[str, Any] = {
        "log_decay": near.log_decay,
        "backward_log_decay": call.backward_log_decay,
    }
    window_sums = compute(Call(q, near.k, near.v, inside, call.causal, near.mask, **decays))
    series_sums = compute(
        Call(
            far_q,
            far.k if far.outside_k is None else far.outside_k,
            far.v,
            outside,
            mask=far.mask,
            log_decay=far.log_decay,
            coefficients=call.coefficients,
            state=state,
            return_state=call.return_state,
        )
    )
    if fading is not None:
        series_sums = faded(series_sums, fading)
    if not call.causal and spec.window < q.shape[2]:
        later_k = near.k if near.outside_k is None else near.outside_k
        decays |= {"mask": near.mask, "coefficients": call.coefficients}
        later = after(compute, Call(unfaded_q, later_k, near.v, outside, **decays), spec.window)
        series_sums = joined(later, series_sums, spec.any_row_scale)
    if not spec.sums_can_cancel:  # as its feature map says, which these keys have had already
        series_sums = series_sums._replace(noise=None, magnitudes=None)
    factor = alone = None
    if call.outside_scale is not None:
        scale = call.outside_scale.to(compute_dtype(q.dtype)).unsqueeze(-1)
        if not no_data(scale) and (scale < 0).any():
            raise ValueError(
                "outside_scale must be 0 or more; the smallest is "
                f"{float(scale.detach().min()):.3g}."
            )
        alone = scale.isinf()
        factor = scale.masked_fill(alone, 1.0)
    return joined(window_sums, series_sums, spec.any_row_scale, factor, alone), (recent, first)


class _Keys(NamedTuple):
    """Keys [B, Hkv, S, D], their values, mask and log decays (0 for hidden keys).

    ``outside_k`` [B, Hkv, S, F] is what they are outside the window, ``None`` if the same.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None
    log_decay: Tensor | None = None
    outside_k: Tensor | None = None

    @property
    def shown(self) -> Tensor:
        """The mask, ones if there is none, with a dimension of all keys."""
        keys = self.k.shape[2]
        if self.mask is None:
            return self.k.new_ones(1, 1, 1, keys, dtype=torch.bool)
        return self.mask.expand(*self.mask.shape[:-1], keys)

    @property
    def shown_keys(self) -> Tensor:
        """The mask [B, S], if it is per key."""
        return self.shown[:, 0, 0].expand(self.k.shape[0], -1)

    def each(self, change: Callable[[str, Tensor], Tensor], mask: Tensor | None) -> _Keys:
        """``change(name, x)`` of the other tensors, with another mask."""
        found = {name: x for name, x in self._asdict().items() if x is not None and name != "mask"}
        return _Keys(mask=mask, **{name: change(name, x) for name, x in found.items()})

    def shifted(self, count: int) -> _Keys:
        """These keys, ``count`` positions later; as many in all, the first ``count`` hidden."""
        mask = _shifted(self.shown.transpose(2, 3), count).transpose(2, 3)
        return self.each(lambda _, x: _shifted(x, count), mask)

    def part(self, keys: slice) -> _Keys:
        """Some of the keys; the mask is per key."""
        mask = None if self.mask is None else self.shown[..., keys]
        return self.each(lambda _, x: x[:, :, keys], mask)

    def without(self, hidden: Tensor) -> _Keys:
        """These keys, of which ``hidden`` [B or 1, S] are hidden, too."""
        return self._replace(mask=self.shown & ~hidden[:, None, None])

    def after(self, kept: KeptKeys) -> _Keys:
        """Kept keys, and after them these; the mask is per key."""
        mask = torch.cat([kept.visible, self.shown_keys], dim=1)[:, None, None]
        return self.each(lambda name, x: torch.cat([getattr(kept, name), x], dim=2), mask)

    def after_first(self, first: KeptKeys) -> _Keys:
        """The first keys, and after them these, as keys inside the window."""
        decay = self.log_decay
        if decay is not None:  # what first keys have faded becomes log decays of the next keys
            assert first.log_decay is not None
            since = decay[:, :, :1] + first.log_decay[:, :, -1:]
            decay = torch.cat([since, decay[:, :, 1:]], dim=2)
            first = first._replace(log_decay=_padded(-first.log_decay.diff(dim=2), 1))
        return self._replace(log_decay=decay, outside_k=None).after(first)

    def last(self, count: int) -> KeptKeys:
        """The last ``count`` keys; hidden ones before the first."""
        missing = max(0, count - self.k.shape[2])
        kept = self.part(slice(-count, None)).each(lambda _, x: _padded(x, missing), None)
        visible = F.pad(self.shown_keys[:, -count:], (missing, 0))
        return KeptKeys(kept.k, kept.v, visible, kept.log_decay, kept.outside_k)

    def first(self, count: int, among: Tensor, window: int) -> KeptKeys:
        """The keys ``among`` [B or 1, S] that have left the window, ``count`` with hidden ones."""
        left = self._replace(outside_k=None).part(slice(None, -window))
        left = left.each(lambda _, x: _padded(x, 0, count), None)  # at least as many as needed
        chosen = F.pad(among[:, :-window], (0, count)).expand(self.k.shape[0], -1)
        index, visible = first_positions(chosen, count)
        if left.log_decay is not None:  # from here on: how far each key has faded
            total = left.log_decay.cumsum(2)
            left = left._replace(log_decay=total[:, :, -1:] - total)

        def take(_: str, x: Tensor) -> Tensor:
            at, hidden = (
                y.view(*index.shape[:1], 1, -1, *[1] * (x.ndim - 3)) for y in (index, ~visible)
            )
            return x.gather(2, at.expand(-1, x.shape[1], -1, *x.shape[3:])).masked_fill(hidden, 0.0)

        found = left.each(take, None)
        return KeptKeys(found.k, found.v, visible, found.log_decay)


def _padded(x: Tensor, before: int, after: int = 0) -> Tensor:
    """``x`` [B, H, S] or [B, H, S, D] with zeros before and after its S positions."""
    return F.pad(x, (*(0, 0) * (x.ndim - 3), before, after))


def _shifted(x: Tensor, count: int) -> Tensor:
    """``x`` [B, H, S] or [B, H, S, D] with ``count`` zeros before it, cut to its length."""
    return _padded(x, min(count, x.shape[2]))[:, :, : x.shape[2]]


@functools.lru_cache(maxsize=64)
def parts_of(
    spec: AttentionSpec, width: int, outside_width: int
) -> tuple[AttentionSpec, AttentionSpec]:
    """The specs inside and outside the window, for mapped queries and keys of these widths."""
    mapped = replace(spec, feature_map="identity", outside="hidden")
    outside = replace(mapped, scale=spec.score_scale(outside_width), window=None, global_keys=0)
    exp: dict[str, Any] = {"series": "exp", "order": None, "coefficients": None}
    # This denominator needs the sum of the weights itself, not only quotients, which a form may
    # return otherwise.
    rest: dict[str, Any] = {"denominator": "sum_plus_one", "epsilon": 0.0, "floor": 0.0}
    rest |= {"scale": spec.score_scale(width), "norm": "none"}
    if outside.row_sum is not None and outside.row_sum.plain and not outside.scale_free:
        outside = replace(outside, denominator="sum_plus_one", epsilon=0.0, floor=0.0)
    return replace(mapped, **exp, **rest), outside
