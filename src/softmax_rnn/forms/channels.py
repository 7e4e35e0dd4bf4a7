"""What the forms with a state share: columns of heads, and the weight sum as a value channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from softmax_rnn.forms.row_sums import RowSums, compute_dtype
from softmax_rnn.spec import AttentionSpec

Function = TypeVar("Function", bound=Callable[..., RowSums])


def uncompiled(form: Function) -> Function:
    """Leave a loop over tokens as it is: compiled, its graph would be as long as the sequence."""
    return cast(Function, torch.compiler.disable(form))


def supports(spec: AttentionSpec, device: str) -> bool:
    """Finite series of the score itself: a clamp would not be an inner product any more."""
    return spec.order is not None and spec.clamp is None


def to_columns(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scaled queries [N, D, G, T], keys [N, D, S], value channels [N, C, S], state [N, C, rows].

    N is B * Hkv. With a row sum there is one more channel, of ones. A hidden key adds nothing to
    any sum: its channels, the one included, are zero.
    """
    dtype = compute_dtype(q.dtype)
    channels = v.to(dtype).mT
    if spec.row_sum is not None:
        channels = torch.cat([channels, channels.new_ones(*v.shape[:2], 1, v.shape[2])], dim=2)
    if mask is not None:
        channels = channels * mask.to(dtype)
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1)).movedim(-1, 2)
    return (
        queries.flatten(0, 1) * spec.score_scale(q.shape[-1]),
        k.to(dtype).mT.flatten(0, 1).contiguous(),
        channels.flatten(0, 1).contiguous(),
        None if state is None else state.flatten(0, 1),
    )


def from_columns(sums: Tensor, spec: AttentionSpec, k: Tensor, state: Tensor | None) -> RowSums:
    """[N, C, G, T] and the state [N, C, rows] back to what every form returns."""
    sums = sums.unflatten(0, k.shape[:2]).movedim(2, -1).flatten(1, 2)
    state = None if state is None else state.unflatten(0, k.shape[:2])
    if spec.row_sum is None:
        return RowSums(sums, state=state)
    return RowSums(sums[..., :-1], sums[..., -1], state=state)
