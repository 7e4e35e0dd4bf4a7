"""Exp that is fast on a CPU: it returns 0 instead of denormal numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exp(this) is well above the smallest normal number. A CPU is many times slower with smaller ones.
FLOOR = {torch.float32: -80.0, torch.float64: -700.0}


def exp_(x: Tensor) -> Tensor:
    """``exp(x)`` in place, for ``x <= 0`` or little above; exactly 0 from ``FLOOR`` down."""
    # On a CPU, exp is 20 times slower for -inf and 100 times for tiny results; exp2 is not.
    return torch.threshold_(x, FLOOR[x.dtype], -torch.inf).mul_(1 / math.log(2)).exp2_()
