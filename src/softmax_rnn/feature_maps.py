"""The feature maps ``phi`` of queries and keys [..., D]; shape and type stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from softmax_rnn.forms.row_sums import compute_dtype


def _cosine(x: Tensor) -> Tensor:
    # A float16 has no place for the least length that normalize divides by, nor for large ones.
    return F.normalize(x.to(compute_dtype(x.dtype)), dim=-1).to(x.dtype)


# The Triton kernels have the same ones of their own.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "cosine": _cosine,
}
