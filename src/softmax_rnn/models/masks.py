"""Masks for this package's attention, in the interface of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)


def mask_of_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for our layer: one value per key if attention sees all or all earlier ones.

    Otherwise (a preallocated cache, packed sequences) it is the full mask of transformers.
    """
    if isinstance(kv_offset, Tensor):  # of a static cache of states, before the new keys
        aligned = q_length == kv_length
    else:
        aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    aligned = aligned and mask_function is causal_mask_function
    if not aligned and mask_function is not bidirectional_mask_function:
        options = {"mask_function": mask_function, "attention_mask": attention_mask, **kwargs}
        options["allow_is_causal_skip"] = False
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **options)
    if attention_mask is None:
        return None
    shown = attention_mask[:, kv_offset : kv_offset + kv_length]
    shown = F.pad(shown, (0, kv_length - shown.shape[1]), value=False)
    if not torch.compiler.is_compiling() and shown.all():
        return None
    return shown[:, None, None]


def mask_of_family(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """As :func:`mask_of_keys`; if attention is bidirectional, one value per key, expanded.

    The expanded mask [B or 1, 1, T, S] has stride 0 over queries, and over keys if all are visible.
    """
    args = (batch_size, q_length, kv_length, q_offset, kv_offset)
    shown = mask_of_keys(*args, mask_function, attention_mask, **kwargs)
    if mask_function is not bidirectional_mask_function or q_length == 1:
        return shown
    if shown is None:
        shown = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=kwargs.get("device"))
    return shown.expand(-1, 1, q_length, kv_length)


def full_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The boolean mask of transformers [B, 1, T, S], even where none is needed."""
    kept = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **{**kwargs, **kept})


def segments_shown(
    mask: Tensor | None,
    tokens: int,
    causal: bool,
    options: Mapping[str, Any],
    cached: bool = False,
) -> Tensor | None:
    """The segments [B or 1, T] of packed sequences; ``None`` if there are none.

    A mask shows them in which a token sees its own segment alone, as transformers makes it of
    positions that begin again. FlashAttention's arguments tell them as well.

    Args:
        mask: boolean, [B, 1, T, S].
        tokens: T.
        causal: whether a token sees no later one.
        options: further arguments of an attention module, such as ``cu_seq_lens_q``.
        cached: whether a cache is given, which packed sequences cannot have.

    Raises:
        ValueError: for ``cu_seq_lens_q`` of other tokens, beside a cache, or beside a mask that
            tells something else.
    """
    bounds = options.get("cu_seq_lens_q")
    if bounds is not None and len(bounds) > 2:
        return _of_bounds(bounds, mask, tokens, causal, cached)
    if cached or mask is None or mask.shape[1:] != (1, tokens, tokens):
        return None
    if tokens == 1 or torch.compiler.is_compiling():
        return None
    first = mask[:, 0].to(torch.uint8).argmax(dim=-1)  # the first key that a query sees
    same = first.unsqueeze(2) == first.unsqueeze(1)
    packed = torch.equal(same.tril() if causal else same, mask[:, 0])
    return first if packed and bool((first.diff(dim=1) >= 0).all()) else None


def _of_bounds(
    bounds: Tensor, mask: Tensor | None, tokens: int, causal: bool, cached: bool
) -> Tensor | None:
    """The segments between FlashAttention's bounds; ``None`` if a full mask hides the others."""
    if int(bounds[-1]) != tokens or cached:
        raise ValueError(
            f"cu_seq_lens_q ends at {int(bounds[-1])}, but there are {tokens} tokens."
            if int(bounds[-1]) != tokens
            else "cu_seq_lens_q tells of several sequences in a row, which have no cache: give "
            "use_cache=False."
        )
    places = torch.arange(tokens, device=bounds.device)
    ids = torch.searchsorted(bounds, places.to(bounds.dtype), right=True)[None]
    if mask is None:
        return ids
    other = ids.unsqueeze(2) != ids.unsqueeze(1)
    if mask.shape[-2] == 1 or bool((mask[:, 0] & other).any()):
        raise ValueError(
            "cu_seq_lens_q and the attention mask tell of different sequences: give no mask of "
            "padding, and position_ids that begin again with each sequence."
        )
    return segments_shown(mask, tokens, causal, {})
