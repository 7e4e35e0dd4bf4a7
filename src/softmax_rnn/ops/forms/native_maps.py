"""Feature maps in C++ for a CPU: one pass, where PyTorch's operations make several."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from softmax_rnn.ops.forms import native_library
from softmax_rnn.ops.forms.first_order import differentiated, transformed
from softmax_rnn.ops.forms.row_sums import no_data


class _Call(ctypes.Structure):
    """``Call`` of native_maps.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "grad", "out")),
        *((name, ctypes.c_int64) for name in ("size", "threads")),
    )


def suits(*given: Tensor) -> bool:
    """Whether these tensors [B, H, T, D] are long enough, of one layout, and not differentiated."""
    x = given[0]
    return (
        x.device.type == "cpu"
        and not any(no_data(each) or differentiated(each) for each in given)
        and not transformed()
        and x.dtype in (torch.float32, torch.float64)
        and x.ndim == 4
        and x.shape[2] >= native_library.LEAST_TOKENS
        and any(all(each.is_contiguous() for each in given) for given in _layouts(given))
        and native_library.ready()
    )


def _layouts(given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """With heads before tokens, and after them."""
    return given, tuple(x.transpose(1, 2) for x in given)


def elu1(x: Tensor) -> Tensor:
    """``elu(x) + 1``, in the layout of ``x``."""
    return _run("elu1", x=x)


def elu1_gradient(mapped: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x, from the mapped x and its gradient."""
    return _run("elu1_gradient", x=mapped, grad=grad)


def _run(name: str, **given: Tensor) -> Tensor:
    out = torch.empty_like(given["x"])
    native_library.run(name, _Call, given | {"out": out}, size=out.numel())
    return out
