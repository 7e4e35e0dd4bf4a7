"""What every form returns, and helpers of all forms: precision, visible keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from softmax_rnn.ops.compiler import constant_when_compiled


class RowSums(NamedTuple):
    """The sums over the visible keys of each query row, up to a factor ``exp(log_scale)``.

    Attributes:
        numerator: ``sum_s w(s) v_s`` times ``exp(-log_scale)``; [B, H, T, E].
        weight_sum: ``sum_s w(s)`` times ``exp(-log_scale)``; [B, H, T]. ``None`` where the form
            need not compute it. If the spec fixes the numerator only up to a positive factor per
            row, the numerator may then be divided by it already.
        log_scale: [B, H, T], or ``None`` for 0. A constant to autograd: the gradients of the
            other two are those of the true sums times ``exp(-log_scale)``.
        state: the state after the last key, if a form with a state was asked for it.
        noise: [B, H, T], the rounding error of a weight sum read from a state, whose monomials can
            cancel; ``None`` where every weight was computed.
    """

    numerator: Tensor
    weight_sum: Tensor | None = None
    log_scale: Tensor | None = None
    state: Tensor | None = None
    noise: Tensor | None = None


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
    """Disable autocast: sums choose their precision. Some devices (meta) have no autocast."""
    return torch.autocast(device, enabled=False) if _has_autocast(device) else nullcontext()


# Older versions of torch.compile cannot trace this.
@constant_when_compiled
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums accumulate in: float32 for the half types, the type itself otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def no_data(x: Tensor) -> bool:
    """Whether the numbers cannot be read: while tracing, and on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta or type(x) is not Tensor


def visible(
    queries: int, keys: int, causal: bool, mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """The full boolean mask, broadcastable to [B, H, T, S]; ``None`` if every key is visible.

    Causal means aligned to the last keys: query ``t`` sees keys up to ``t + S - T``.
    """
    if not causal:
        return mask
    lower = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return lower if mask is None else lower & mask


def visible_count(
    queries: int, keys: int, causal: bool, mask: Tensor | None, device: torch.device
) -> Tensor:
    """Number of visible keys of every row: int64, broadcastable to [B, H, T]."""
    if mask is None:
        if causal:
            return torch.arange(keys - queries + 1, keys + 1, device=device)
        return torch.full((1,), keys, device=device)
    mask = mask.expand(*mask.shape[:-1], keys)
    if mask.shape[-2] != 1:
        full = visible(queries, keys, causal, mask, device)
        assert full is not None
        return full.sum(-1)
    per_key = mask.squeeze(-2)
    if causal:
        return per_key.cumsum(-1)[..., keys - queries :]
    return per_key.sum(-1, keepdim=True)


def visible_keys(mask: Tensor, kv_heads: int) -> Tensor:
    """The keys that any query sees, of a four-dimensional mask; broadcastable to [B, Hkv, S, 1]."""
    shown = mask.any(-2)
    if shown.shape[1] > 1:
        shown = shown.unflatten(1, (kv_heads, -1)).any(2)
    return shown.unsqueeze(-1)
