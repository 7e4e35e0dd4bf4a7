"""Float32 matrix products on CPUs for which MKL lacks its widest kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from softmax_rnn.training.environment import processor


@contextmanager
def widest_float32_products() -> Iterator[bool]:
    """Multiply with oneDNN where only the speed changes; yields whether it does.

    PyTorch gives float32 products to MKL, which on an AMD CPU runs AVX2 kernels even where there is
    AVX-512 (of a Zen 5 core: 116 against 250 GFLOP/s). The switch to oneDNN also *allows* bfloat16
    inside, which oneDNN uses with AMX tiles only. So nothing is switched where there are any, and
    the switch is undone if a test product has lost digits.
    """
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and "AMD" in processor()
    if wide and torch.backends.mkldnn.is_available() and not torch.cpu._is_amx_tile_supported():
        products.fp32_precision = "bf16"
    try:
        if products.fp32_precision != before and not _keeps_float32():
            products.fp32_precision = before
        yield products.fp32_precision != before
    finally:
        products.fp32_precision = before


def _keeps_float32() -> bool:
    x = torch.full((256, 256), 1 + 2.0**-20)
    return torch.equal(x @ torch.eye(256), x)
