"""The native form: the blocked form as C++ for the CPU, compiled at its first use.

It computes the sums of ``formula.attention`` for fixed series. A tile of scores stays in the
cache through both products, in both passes. The library is ``cpp.py``'s.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from softmax_rnn.ops.decay import log_decay_grad
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.pairs.blocks import Blocks, block_length
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype, no_data, without_autocast
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec, RowSum

_BLOCK = 96  # queries per block, of which fewer compute fewer hidden pairs
_INTS = 2**31 - 1  # the largest stride that a matrix product takes


def native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None = None,
) -> RowSums:
    """As :func:`softmax_rnn.ops.forms.pairs.dense.dense`, of q and k before the feature map.

    The T x S weights are not stored. The mask is per key. The results are the same in every run
    with the same number of threads.
    """
    q, k, v = (x.to(compute_dtype(x.dtype)) for x in (q, k, v))
    # The kernels apply elu + 1 themselves, unless the bound of faded keys needs mapped ones.
    maps = spec.feature_map == "elu1" and not (spec.shifted and log_decay is not None)
    if not maps:
        q, k = (FEATURE_MAPS[spec.feature_map](x) for x in (q, k))
    # The powers of `scale_free` specs are scaled by row, which a quotient would not show.
    quotient = spec.row_sum == RowSum() and spec.sign_definite and not spec.scale_free
    numerator, weight_sum, log_scale, finite = _NativeSums.apply(
        *first_order(q, k, v, log_decay), mask, spec, causal, quotient, maps
    )
    if spec.order is None:  # the kernels check finite series
        finite = None
    if quotient:
        return RowSums(numerator, finite=finite)
    return RowSums(numerator, weight_sum, log_scale if spec.shifted else None, finite=finite)


class _NativeSums(torch.autograd.Function):
    """(q, k, v, log decay) -> (numerator, weight sum, row maximum, whether all are finite).

    The maximum has no gradient. With ``quotient`` the numerator is divided by the weight sum, which
    then has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        mask: Tensor | None,
        spec: AttentionSpec,
        causal: bool,
        quotient: bool,
        maps: bool,
    ) -> tuple[Tensor, ...]:
        total = first = None
        if log_decay is not None:
            blocks = Blocks(q, k, v, log_decay, None, None, spec, causal, _BLOCK)
            total = blocks.total
            first = None if no_data(q) else torch.tensor(blocks.firsts(), device="cpu")
        if mask is not None:
            mask = mask[:, 0, 0].expand(q.shape[0], k.shape[2]).contiguous()
        inputs = (q, k, v, mask, total, first)
        ctx.options = (
            list(PowerSeries.from_spec(spec).coefficients or ()),
            spec.score_scale(q.shape[-1]),
            math.inf if spec.clamp is None else spec.clamp,
            spec.shifted,
            quotient,
            maps,
            causal,
            spec.hiding_window or 0,
            block_length(spec, _BLOCK),
        )
        *sums, mapped_q, mapped_k = torch.ops.softmax_rnn.native_sums(*inputs, *ctx.options)
        saved = (mapped_q, mapped_k, *inputs[2:]) if maps else inputs
        ctx.save_for_backward(*saved, sums[2], *(sums[:2] if quotient else (None, None)))
        ctx.mark_non_differentiable(*sums[1 if quotient else 2 :])
        ctx.set_materialize_grads(False)
        return tuple(sums)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *inputs, maximum, numerator, weight_sum = ctx.saved_tensors
        q, _, v, _, total, _ = inputs
        if grad is None:
            grad = q.new_zeros(*q.shape[:-1], v.shape[-1])
        gradients = torch.ops.softmax_rnn.native_gradients(
            *inputs, *ctx.options, maximum, numerator, weight_sum, grad, grad_sum
        )
        dq, dk, dv, by_query, by_key = gradients
        dlog_decay = None if total is None else log_decay_grad(by_query, by_key)
        return dq, dk, dv, dlog_decay, *[None] * 5


class _PairsCall(ctypes.Structure):
    """``Call`` of pairs.cpp: pointers (0 for none), strides, sizes and numbers.

    ``total`` are the running sums of the log decays [B * Hkv, S], ``first`` the first key that a
    block of queries needs [blocks, B * Hkv], and ``terms`` the number of coefficients, 0 for exp.
    ``dk``, ``dv`` and ``by_key`` have one copy for each of ``parts``. ``by_query`` and ``by_key``
    are the gradients of ``G_t`` and ``-G_s``.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "grad", "grad_sum", "mask")),
        *((name, ctypes.c_void_p) for name in ("total", "first", "coefficients", "numerator")),
        *((name, ctypes.c_void_p) for name in ("weight_sum", "maximum", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("mapped_q", "mapped_k", "finite")),
        *((name, ctypes.c_void_p) for name in ("by_query", "by_key")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("q", "k", "v", "grad")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys")),
        *((name, ctypes.c_int64) for name in ("width", "value_width", "block", "window")),
        *((name, ctypes.c_int64) for name in ("causal", "shifted", "quotient", "maps", "terms")),
        *((name, ctypes.c_int64) for name in ("parts", "threads")),
        *((name, ctypes.c_double) for name in ("scale", "clamp")),
    )


class _Inputs(NamedTuple):
    """The inputs of both operators, and numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    total: Tensor | None
    first: Tensor | None
    coefficients: list[float]
    scale: float
    clamp: float
    shifted: bool
    quotient: bool
    maps: bool
    causal: bool
    window: int
    block: int


def _run(
    name: str, inputs: _Inputs, others: dict[str, Tensor | None], grad: Tensor | None, parts: int
) -> None:
    """Call a function of the library; the elements of ``others`` are contiguous."""
    q, k, v, mask, total, first, coefficients, *numbers = inputs
    strided = {"q": q, "k": k, "v": v} | ({} if grad is None else {"grad": grad})
    strided = {name: _rows(x) for name, x in strided.items()}
    others = others | {"mask": mask, "total": total, "first": first}
    if coefficients:
        others["coefficients"] = torch.tensor(coefficients, dtype=torch.float64, device="cpu")
    tensors = strided | {name: x.contiguous() for name, x in others.items() if x is not None}
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1]}
    sizes |= {"queries": q.shape[2], "keys": k.shape[2], "width": q.shape[3]}
    cpp.run(
        name,
        _PairsCall,
        tensors,
        **{f"{name}_strides": _strides(x) for name, x in strided.items()},
        **sizes,
        value_width=v.shape[3],
        terms=len(coefficients),
        parts=parts,
        **dict(zip(_Inputs._fields[7:], numbers, strict=True)),
    )


def _rows(x: Tensor) -> Tensor:
    """The tensor with rows as a matrix product takes them."""
    rows, width = x.shape[2:]
    taken = x.stride(3) == 1 and (rows == 1 or width <= x.stride(2) <= _INTS)
    return x if taken else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of batch, heads and rows; for a single row, its width."""
    return *x.stride()[:2], x.stride(2) if x.shape[2] > 1 else x.shape[3]


def _parts(q: Tensor, k: Tensor, block: int) -> int:
    """How many tasks share a key head in the backward pass, so that every thread has as many."""
    threads, heads = torch.get_num_threads(), k.shape[0] * k.shape[1]
    if heads >= 4 * threads:
        return 1
    return min(threads // math.gcd(heads, threads), -(-q.shape[2] // block))


def _sums_of(*given: Any) -> tuple[Tensor, ...]:
    """The results of the operator, without data; mapped queries and keys only if it maps."""
    q, k, v, maps = *given[:3], _Inputs(*given).maps
    weight_sum = q.new_empty(q.shape[:3])
    sums = q.new_empty(*q.shape[:3], v.shape[3]), weight_sum, torch.empty_like(weight_sum)
    mapped = (x.new_empty(x.shape if maps else 0) for x in (q, k))
    return *sums, q.new_empty(()), *mapped


_RESULTS = ("numerator", "weight_sum", "maximum", "finite", "mapped_q", "mapped_k")


def _sums(*given: Any) -> tuple[Tensor, ...]:
    results = _sums_of(*given)
    _run("sums", _Inputs(*given), dict(zip(_RESULTS, results, strict=True)), None, 1)
    return results


def _gradients_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    sums = [x.new_empty(x.shape[:3], dtype=torch.float64) for x in (k[:, :, : q.shape[2]], k)]
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)), *sums


def _gradients(*given: Any) -> tuple[Tensor, ...]:
    *first, maximum, numerator, weight_sum, grad, grad_sum = given
    inputs = _Inputs(*first)
    q, k, v = inputs[:3]
    parts = _parts(q, k, inputs.block)
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(parts, *k.shape), v.new_zeros(parts, *v.shape)
    by_query = q.new_zeros(q.shape[0], k.shape[1], q.shape[2], dtype=torch.float64)
    by_key = k.new_zeros(parts, *k.shape[:3], dtype=torch.float64)
    outputs = {"dq": dq, "dk": dk, "dv": dv, "by_query": by_query, "by_key": by_key}
    saved = {"maximum": maximum, "numerator": numerator, "weight_sum": weight_sum}
    _run("gradients", inputs, {**outputs, **saved, "grad_sum": grad_sum}, grad, parts)
    dk, dv, by_key = (x[0] if parts == 1 else x.sum(0) for x in (dk, dv, by_key))
    return dq, dk, dv, by_query, by_key


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? total, Tensor? first"
_OPTIONS = "float[] coefficients, float scale, float clamp, bool shifted, bool quotient, bool maps"
_INPUTS = f"{_TENSORS}, {_OPTIONS}, bool causal, int window, int block"
_SAVED = "Tensor maximum, Tensor? numerator, Tensor? weight_sum"
# Operators, so that torch.compile keeps one graph; of plain functions, since the decorator for
# custom operators imports the compiler.
_operators = library.Library("softmax_rnn", "FRAGMENT")
_operators.define(f"native_sums({_INPUTS}) -> ({', '.join(['Tensor'] * len(_RESULTS))})")
_operators.impl("native_sums", _sums, "CPU")
_operators.impl("native_sums", _sums_of, "Meta")
_operators.define(
    f"native_gradients({_INPUTS}, {_SAVED}, Tensor grad, Tensor? grad_sum)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_operators.impl("native_gradients", _gradients, "CPU")
_operators.impl("native_gradients", lambda q, k, v, *_: _gradients_of(q, k, v), "Meta")
