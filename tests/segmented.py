"""Rows of several segments, and attention that computes them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops.spec import AttentionSpec

OF_TOKENS = (
    *("input_gate", "output_gate", "log_decay", "backward_log_decay", "outside_q", "outside_k"),
)


def ids_of(cuts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    """Numbers of segments that begin at these places; they are no counts, and come again."""
    return torch.stack(
        [torch.tensor([(7, -2)[sum(s >= cut for cut in row) % 2] for s in range(tokens)])
         for row in cuts]
    )  # fmt: skip


def one_by_one(cuts: Sequence[Sequence[int]], attention: Any = sr.attention) -> Any:
    """Attention of every segment alone."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None, **extras: Any
    ) -> Tensor:
        rows = []
        for b, row in enumerate(cuts):
            parts = []
            for first, last in zip([0, *row], [*row, q.shape[2]], strict=True):
                here = slice(b, b + 1), slice(None), slice(first, last)
                own = {
                    name: x[here] if name in OF_TOKENS and x.ndim > 1 else x
                    for name, x in extras.items()
                }
                seen = None
                if mask is not None:
                    full = mask.expand(len(q), *mask.shape[1:])[b : b + 1, :, :, first:last]
                    seen = full if full.shape[2] == 1 else full[:, :, first:last]
                parts.append(attention(q[here], k[here], v[here], spec, mask=seen, **own))
            rows.append(torch.cat(parts, dim=2))
        return torch.cat(rows)

    return attend
