"""The result of every form, and helpers for all forms: precision and visible keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softmax_rnn.ops.compiler import constant_when_compiled
from softmax_rnn.ops.forms.first_order import traced, unreadable, wrapped


class RowSums(NamedTuple):
    """The sums over the visible keys of each query row, up to a factor ``exp(log_scale)``.

    Attributes:
        numerator: ``sum_s w(s) v_s`` times ``exp(-log_scale)``; [B, H, T, E].
        weight_sum: ``sum_s w(s)`` times ``exp(-log_scale)``; [B, H, T]. ``None`` if the form
            does not need it. Then, if the output does not depend on a positive factor per row,
            the numerator may already be divided by the weight sum.
        log_scale: [B, H, T], or ``None`` for 0. It has no gradient: the gradients of
            numerator and weight sum are those of the true sums times ``exp(-log_scale)``.
        state: the state after the last key, if it was requested.
        noise: [B, H, T], the rounding error of a weight sum that was read from a state
            (``magnitudes.py``); ``None`` if every weight was computed, or no term can cancel.
        magnitudes: those of the state after the last key, if there is a noise.
        finite: one number, 0 if a sum is infinite or NaN; ``None`` if that is not known.
    """

    numerator: Tensor
    weight_sum: Tensor | None = None
    log_scale: Tensor | None = None
    state: Tensor | None = None
    noise: Tensor | None = None
    magnitudes: Tensor | None = None
    finite: Tensor | None = None


def joined(
    near: RowSums,
    far: RowSums,
    quotient: bool,
    factor: Tensor | None = None,
    alone: Tensor | None = None,
) -> RowSums:
    """The sums of both; those of ``far`` times ``factor``, broadcastable to [B, H, T].

    Where ``alone`` is true, those of ``far`` alone, if there are any. ``quotient`` is whether a
    factor of a row may cancel: then sums of any size count, also beside those of a larger scale.
    """
    scales = [torch.zeros_like(near.numerator[..., 0]) if x is None else x for x in
              (near.log_scale, far.log_scale)]  # fmt: skip
    sizes = [_size(near), _size(far)]
    if factor is not None:
        sizes[1] = sizes[1] * factor.detach().abs()
    if alone is not None:
        alone = alone & (sizes[1] > 0)
        near_sum = None if near.weight_sum is None else near.weight_sum.masked_fill(alone, 0.0)
        hidden = near.numerator.masked_fill(alone.unsqueeze(-1), 0.0)
        near = near._replace(numerator=hidden, weight_sum=near_sum)
        sizes[0] = sizes[0].masked_fill(alone, 0.0)
    largest = scales[0].maximum(scales[1])
    most = 0.9 * math.log(torch.finfo(largest.dtype).max)
    if quotient:  # a scale says little: its sums may be of far smaller keys, or 0
        ours, theirs = (
            (scale + size.log().clamp(min=-most)).masked_fill(size == 0, -torch.inf)
            for scale, size in zip(scales, sizes, strict=True)
        )
        true = ours.maximum(theirs)
        largest = torch.where(true == -torch.inf, largest, true)
    # Sums of 0 count as well: they have gradients.
    ours, theirs = ((scale - largest).clamp(max=most).exp() for scale in scales)
    theirs = theirs if factor is None else theirs * factor
    numerator = near.numerator * ours.unsqueeze(-1) + far.numerator * theirs.unsqueeze(-1)
    weight_sum = noise = None
    if near.weight_sum is not None and far.weight_sum is not None:
        weight_sum = near.weight_sum * ours + far.weight_sum * theirs
    for part, share in ((near, ours), (far, theirs)):
        if part.noise is not None:
            added = part.noise * share.detach().abs()
            noise = added if noise is None else noise + added
    return RowSums(numerator, weight_sum, largest, far.state, noise, far.magnitudes)


def _size(sums: RowSums) -> Tensor:
    """The largest number of each row [B, H, T]; 0 if it sees no key, or only those of weight 0."""
    size = torch.linalg.vector_norm(sums.numerator.detach(), torch.inf, dim=-1)
    if sums.weight_sum is not None:
        size = size.maximum(sums.weight_sum.detach().abs())
    return size.nan_to_num(nan=1.0)


Backward = TypeVar("Backward", bound=Callable[..., Any])


def without_autocast(backward: Backward) -> Backward:
    """Disable autocast in a hand-written backward pass, which may run under it."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        device = next((x.device.type for x in grads if isinstance(x, Tensor)), "cpu")
        with no_autocast(device):
            return backward(ctx, *grads)

    return cast(Backward, run)


def no_autocast(device: str) -> AbstractContextManager[None]:
    """Disable autocast, as sums choose their own precision; some devices (meta) have none."""
    enabled = _has_autocast(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


# Older versions of torch.compile cannot trace this.
@constant_when_compiled
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32 for float16 and bfloat16, otherwise ``dtype`` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Others may stand for tensors that are elsewhere, or for none yet.
PLAIN = (Tensor, nn.Parameter)


def no_data(x: Tensor) -> bool:
    """Whether the values cannot be read: while tracing, on the meta device, in ``torch.vmap``."""
    if x.is_meta or type(x) not in PLAIN:
        return True
    return unreadable() and (traced() or (wrapped(x) and _mapped(x)))


def _mapped(x: Tensor) -> bool:
    """Whether ``torch.vmap`` computes ``x`` for several inputs at once."""
    try:
        x.detach().sum().item()
    except RuntimeError:
        return True
    return False


def visible(
    queries: int,
    keys: int,
    causal: bool,
    mask: Tensor | None,
    device: torch.device,
    window: int | None = None,
    global_keys: int = 0,
) -> Tensor | None:
    """The full boolean mask, broadcastable to [B, H, T, S]; ``None`` if every key is visible.

    Causal attention aligns queries to the last keys: query ``t`` sees keys up to ``t + S - T``, of
    which a window leaves the last ``window`` and the :func:`first_visible`. Otherwise a window, of
    as many queries as keys, leaves as many later keys as earlier ones, too.
    """
    if not causal and window is None:
        return mask
    own = keys - queries  # the position of the first query
    shown = torch.ones(queries, keys, dtype=torch.bool, device=device)
    shown = shown.tril(own if causal or window is None else window - 1)
    if window is not None:
        inside = shown.triu(own - window + 1)
        if global_keys:
            first = first_visible(mask, keys, global_keys, device)[:, None, None]
            inside = inside | (shown.tril(own) & first)
        shown = inside
    return shown if mask is None else shown & mask


def first_visible(mask: Tensor | None, keys: int, count: int, device: torch.device) -> Tensor:
    """Which keys are the first ``count`` that any query sees: boolean, [B or 1, S]."""
    if mask is None:
        return (torch.arange(keys, device=device) < count).unsqueeze(0)
    shown = mask.expand(*mask.shape[:-1], keys).any(-2).any(1)
    return shown & (shown.cumsum(-1) <= count)


def first_positions(shown: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The positions of the first ``count`` visible keys of [B, S], and whether there are so many.

    Both are [B, count], if there are as many keys.
    """
    found, index = shown.to(torch.uint8).sort(descending=True, stable=True)
    return index[:, :count], found[:, :count] > 0


def visible_count(
    queries: int,
    keys: int,
    causal: bool,
    mask: Tensor | None,
    device: torch.device,
    window: int | None = None,
    global_keys: int = 0,
) -> Tensor:
    """Number of visible keys of every row: int64, broadcastable to [B, H, T]."""
    if mask is None:
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
    mask = mask.expand(*mask.shape[:-1], keys)
    if mask.shape[-2] != 1:
        full = visible(queries, keys, causal, mask, device, window, global_keys)
        assert full is not None
        return full.sum(-1)
    per_key = mask.squeeze(-2)
    if not causal and window is None:
        return per_key.sum(-1, keepdim=True)
    count = per_key.cumsum(-1)
    if window is not None:  # of the keys before the window, the first ones remain
        first = per_key & first_visible(mask, keys, global_keys, device).unsqueeze(1)
        before = F.pad(count - first.cumsum(-1), (min(window, keys), 0))[..., :keys]
        if not causal:
            last = torch.arange(keys, device=device) + (min(window, keys) - 1)
            count = count[..., last.clamp(max=max(0, keys - 1))]
        count = count - before
    return count[..., keys - queries :]


def visible_keys(mask: Tensor, kv_heads: int) -> Tensor:
    """The keys that at least one query sees, broadcastable to [B, Hkv, S, 1]; the mask is 4-D."""
    shown = mask.any(-2)
    if shown.shape[1] > 1:
        shown = shown.unflatten(1, (kv_heads, -1)).any(2)
    return shown.unsqueeze(-1)


def without_hidden(mask: Tensor, *inputs: Tensor) -> Iterator[Tensor]:
    """Inputs of keys [B, Hkv, S, ...], with zeros for those that no query sees.

    A weight of zero times NaN or infinity would be NaN, and so would be the gradients.
    """
    for x in inputs:
        hidden = ~visible_keys(mask, x.shape[1])
        yield x.masked_fill(hidden.squeeze(-1) if x.ndim == 3 else hidden, 0.0)
