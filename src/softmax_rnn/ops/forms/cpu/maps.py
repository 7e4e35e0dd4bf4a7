"""Feature maps in C++ for a CPU: one pass, where PyTorch's operations make several."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.first_order import differentiated, transformed
from softmax_rnn.ops.forms.row_sums import no_data


class _MapCall(ctypes.Structure):
    """``Call`` of maps.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "grad", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "rows", "width")),
        ("strides", ctypes.c_int64 * 3),
        ("threads", ctypes.c_int64),
    )


def takes(*given: Tensor) -> bool:
    """Whether these tensors [B, H, T, D] are long enough, in rows, and not differentiated."""
    x = given[0]
    return (
        x.device.type == "cpu"
        and not any(no_data(each) or differentiated(each) for each in given)
        and not transformed()
        and x.dtype in (torch.float32, torch.float64)
        and x.ndim == 4
        and x.shape[2] >= cpp.LEAST_TOKENS
        and x.numel() > 0
        and (x.stride(3) == 1 or x.shape[3] == 1)
        and not cpp.missing(build=True)
    )


def elu1(x: Tensor) -> Tensor:
    """``elu(x) + 1``, contiguous."""
    return _run("elu1", x)


def elu1_gradient(mapped: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x, from the mapped x and its gradient; contiguous."""
    return _run("elu1_gradient", mapped, grad=grad.contiguous())


def _run(name: str, x: Tensor, **given: Tensor) -> Tensor:
    x = x.resolve_neg()  # a copy may have other strides
    out = x.new_empty(x.shape)
    sizes = dict(zip(("batch", "heads", "rows", "width"), x.shape, strict=True))
    cpp.run(name, _MapCall, {"x": x, **given, "out": out}, strides=x.stride()[:3], **sizes)
    return out
