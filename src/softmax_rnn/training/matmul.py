"""Float32 matrix products on CPUs on which MKL does not use its widest kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from softmax_rnn._utils.machine import processor


@contextmanager
def widest_float32_products() -> Iterator[bool]:
    """Multiply with oneDNN if this changes only the speed; yields whether oneDNN is used.

    PyTorch computes float32 products with MKL. On an AMD CPU with AVX-512, MKL still runs AVX2
    kernels (on a Zen 5 core: 116 instead of 250 GFLOP/s). The switch to oneDNN also *allows*
    bfloat16 internally, which oneDNN uses only with AMX tiles. So the switch is not made on CPUs
    with AMX tiles, and it is undone if a test product loses digits.
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
