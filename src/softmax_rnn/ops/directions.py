"""Both directions: causal attention to the keys up to each query, and to those after it.

Later keys are earlier ones of the reversed sequence. There the keys are shifted by a token, so that
no weight is in both sums and none is subtracted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.ops.decay import faded
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, joined
from softmax_rnn.ops.inputs import Call
from softmax_rnn.ops.spec import AttentionSpec, RowSum


def both_directions(compute: Callable[[Call], RowSums], call: Call) -> RowSums:
    """The sums over all keys; ``compute`` computes those of a causal call."""
    given = call.spec
    spec, later_spec = _specs(given, call.q.shape[3])
    if spec.feature_map != given.feature_map:
        q, k = (FEATURE_MAPS[given.feature_map](x) for x in (call.q, call.k))
        call = replace(call, q=q, k=k, v=call.v.to(q.dtype))  # features of half types are wider
    sums = compute(replace(call, spec=spec, causal=True, backward_log_decay=None))
    if given.window != 1 and call.q.shape[2] > 1:
        later = after(compute, replace(call, spec=later_spec), 1)
        sums = joined(sums, later, given.any_row_scale)
    return sums if given.sums_can_cancel else sums._replace(noise=None)


@functools.lru_cache(maxsize=64)
def _specs(spec: AttentionSpec, width: int) -> tuple[AttentionSpec, AttentionSpec]:
    """The specs of earlier and of later keys, for queries and keys of this width."""
    if spec.row_sum == RowSum():  # by which a form might divide at once
        spec = replace(spec, denominator="detached_sum")
    if spec.decay == "channel":  # a query's features fade
        spec = replace(spec, feature_map="identity", scale=spec.score_scale(width))
    window = None if spec.window is None else max(1, spec.window - 1)  # without the query's own key
    return spec, replace(spec, window=window, global_keys=0)


def after(compute: Callable[[Call], RowSums], call: Call, distance: int) -> RowSums:
    """The sums over the keys at least ``distance`` after each query; ``distance < T``.

    They are those of a causal call: its queries are all that have such keys, its keys are theirs,
    both from the last one on. It has all decays but those of the ``distance`` tokens from a query
    on, with which its sums, or with a decay per channel its queries, are multiplied.
    """
    spec, tokens = call.spec, call.q.shape[2]
    q, k, v, mask, decay, fading = call.q, call.k, call.v, call.mask, _backward_decay(call), None

    def of_queries(x: Tensor) -> Tensor:
        return x[:, :, : tokens - distance].flip(2)

    def of_keys(x: Tensor) -> Tensor:
        return x[:, :, distance:].flip(2)

    if decay is not None:
        total = F.pad(decay.cumsum(2), (*(0, 0) * (decay.ndim - 3), 1, 0))[:, :, :tokens]
        fading = (total[:, :, distance:] - total[:, :, : tokens - distance]).flip(2)
        fading = fading.to(compute_dtype(q.dtype)).repeat_interleave(
            q.shape[1] // decay.shape[1], 1
        )
        decay = of_keys(decay)
    q = of_queries(q)
    if fading is not None and spec.decay == "channel":
        q, fading = q * fading.exp(), None
        k, v = k.to(q.dtype), v.to(q.dtype)  # what is left of a query is below the range of float16
    if mask is not None and mask.shape[2] > 1:
        mask = of_queries(mask)
    if mask is not None and mask.shape[3] > 1:
        mask = of_keys(mask.mT).mT
    k, v = of_keys(k), of_keys(v)
    later = replace(call, q=q, k=k, v=v, mask=mask, log_decay=decay, backward_log_decay=None)
    later.causal = True
    sums = compute(later)
    if fading is not None:
        sums = faded(sums, fading)
    found = sums.numerator, sums.weight_sum, sums.log_scale, sums.noise
    numerator, weight_sum, scale, noise = (_in_place(x, tokens) for x in found)
    return RowSums(numerator, weight_sum, scale, noise=noise)


def _in_place(x: Tensor | None, tokens: int) -> Any:
    """Sums [B, H, n] or [B, H, n, E] of the first n queries, the last one first, of all queries."""
    if x is None:
        return None
    return F.pad(x.flip(2), (*(0, 0) * (x.ndim - 3), 0, tokens - x.shape[2]))


def _backward_decay(call: Call) -> Tensor | None:
    """The log decays of later keys: by default of the same distance as those of earlier ones."""
    if call.backward_log_decay is not None or call.log_decay is None:
        return call.backward_log_decay
    return F.pad(call.log_decay[:, :, 1:], (*(0, 0) * (call.log_decay.ndim - 3), 0, 1))
