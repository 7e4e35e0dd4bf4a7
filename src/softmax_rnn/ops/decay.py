"""Decays: weights decay by ``exp(G_t - G_s)``, where ``G`` is the running sum of the log decays.

Only exponents <= 0 are ever computed. ``exp(-G_s)`` alone would overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import RowSums, visible_keys

MIN_LOG_DECAY = -1e4  # its exponential is 0 in float64
# Factors below the exponential of this are 0. Products of smaller ones with other numbers would be
# denormal, and a CPU is many times slower with those.
FLOOR = {torch.float32: -65.0, torch.float64: -700.0}


def per_key_decay(log_decay: Tensor | None, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The decay of every key, [B, Hkv, S] or [B, Hkv, S, D] in float64; 0 for hidden keys."""
    if log_decay is None:
        return None
    # The difference of two running sums loses digits; MPS devices have no float64.
    log_decay = log_decay.to(torch.float32 if k.device.type == "mps" else torch.float64)
    if log_decay.ndim == 1:
        log_decay = log_decay[:, None].expand(k.shape[:3])
    log_decay = log_decay.clamp(min=MIN_LOG_DECAY)
    if mask is None:
        return log_decay
    hidden = ~visible_keys(mask, k.shape[1])
    return log_decay.masked_fill(hidden if log_decay.ndim == 4 else hidden.squeeze(-1), 0.0)


def faded(sums: RowSums, log: Tensor) -> RowSums:
    """The sums times ``exp(log)`` [B, H, T], whose logarithm is at most 0.

    It is kept as a logarithm: all that a query sees may have faded as far. What has met a decay of
    ``MIN_LOG_DECAY`` is 0, as in every form.
    """
    gone = log <= 0.999 * MIN_LOG_DECAY
    unit = (log - log.detach()).exp().masked_fill(gone, 0.0)  # 1, with the gradient of the factor
    scale = log.detach() if sums.log_scale is None else sums.log_scale + log.detach()
    weight_sum, noise = (
        None if x is None else x * y
        for x, y in ((sums.weight_sum, unit), (sums.noise, unit.detach()))
    )
    numerator = sums.numerator * unit.unsqueeze(-1)
    return sums._replace(numerator=numerator, weight_sum=weight_sum, log_scale=scale, noise=noise)


def differences(log_decay: Tensor, queries: int) -> Tensor:
    """``G_t - G_s`` of every query and key, 0 for later keys: [B, H, T, S] or [B, H, T, S, D].

    The difference of two running sums loses digits, so the sums are float64.
    """
    total = log_decay.cumsum(2)
    last = total[:, :, total.shape[2] - queries :]
    return (last.unsqueeze(3) - total.unsqueeze(2)).clamp(max=0.0)


def fade_(exponent: Tensor) -> Tensor:
    """``exp(exponent)`` in place: at most 1, and exactly 0 below ``FLOOR``."""
    floor = FLOOR[exponent.dtype]
    # On a CPU, exp is 20 times slower for -inf and 100 times for tiny results.
    return torch.threshold_(exponent.clamp_(floor - 1, 0.0).exp_(), math.exp(floor), 0.0)


def log_decay_grad(by_query: Tensor, by_key: Tensor) -> Tensor:
    """The gradient of log decays, from those of ``G_t`` and ``-G_s``; a part of all later ``G``.

    Both sides contain all pairs of keys and queries, but a log decay fades only some: the others
    cancel, as far as both sides were computed from the same numbers.

    Args:
        by_query: what the last T positions receive as queries, [B, Hkv, T] or [B, Hkv, T, D].
        by_key: what all positions receive as keys, [B, Hkv, S] or [B, Hkv, S, D]; overwritten.
            Both are float64, where there is one.
    """
    total = by_key.neg_()
    total[:, :, total.shape[2] - by_query.shape[2] :] += by_query
    return total.flip(2).cumsum(2).flip(2)
