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
        sums = joined(sums, after(compute, replace(call, spec=later_spec), 1))
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
    q, mask, decay, faded = call.q, call.mask, _backward_decay(call), None

    def of_queries(x: Tensor) -> Tensor:
        return x[:, :, : tokens - distance].flip(2)

    def of_keys(x: Tensor) -> Tensor:
        return x[:, :, distance:].flip(2)

    if decay is not None:
        total = F.pad(decay.cumsum(2), (*(0, 0) * (decay.ndim - 3), 1, 0))[:, :, :tokens]
        faded = (total[:, :, distance:] - total[:, :, : tokens - distance]).flip(2)
        faded = faded.to(compute_dtype(q.dtype)).repeat_interleave(q.shape[1] // decay.shape[1], 1)
        decay = of_keys(decay)
    q = of_queries(q)
    if faded is not None and spec.decay == "channel":
        q, faded = q * faded.exp().to(q.dtype), None
    if mask is not None and mask.shape[2] > 1:
        mask = of_queries(mask)
    if mask is not None and mask.shape[3] > 1:
        mask = of_keys(mask.mT).mT
    k, v = of_keys(call.k), of_keys(call.v)
    later = replace(call, q=q, k=k, v=v, mask=mask, log_decay=decay, backward_log_decay=None)
    later.causal = True
    sums = compute(later)
    numerator, weight_sum, scale = sums.numerator, sums.weight_sum, sums.log_scale
    if faded is not None:  # in the logarithm: all that a query sees may have faded as far
        scale = faded.detach() if scale is None else scale + faded.detach()
        unit = (faded - faded.detach()).exp()  # 1, with the gradient of the factor
        numerator = numerator * unit.unsqueeze(-1)
        weight_sum = None if weight_sum is None else weight_sum * unit
    found = numerator, weight_sum, scale, sums.noise
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
