"""The chunked form's loops in C++ for the CPU, of fixed series with decays per head or token.

``chunked`` calls them in place of its own, and does the rest. The library is
``cpp.py``'s.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.chunks.tables import Tables
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.monomials import monomial_factors


class ChunksInCpp(NamedTuple):
    """What is the same for all chunks of a call."""

    tables: Tables
    causal: bool
    length: int


def sums(inputs: Columns, chunks: ChunksInCpp, out: Tensor, last: Tensor, kept: Tensor) -> None:
    """Fill the sums, the state after all keys and the backward pass's states.

    The shapes are those of ``chunked``; those that are not needed are empty.
    """
    outputs = {"sums": _tokens_first(out), "last": last, "kept": kept}
    _run("chunk_sums", inputs, chunks, {}, outputs)


def gradients(
    inputs: Columns,
    chunks: ChunksInCpp,
    kept: Tensor,
    dsums: Tensor,
    dlast: Tensor | None,
    out: Columns,
) -> None:
    """Fill the gradients ``out`` of queries, keys, values and state."""
    given = {"dsums": _tokens_first(dsums), "kept": kept}
    names = ("dq", "dk", "dv")
    outputs = {name: _tokens_first(x) for name, x in zip(names, out[:3], strict=True)}
    shape = (*inputs.values.shape[:2], len(chunks.tables.weights))
    dstate = dsums.new_zeros(shape) if dlast is None else dlast.clone()
    _run("chunk_gradients", inputs, chunks, given | {"dstate": dstate}, outputs, dlast)
    if out.state is not None and out.state.numel():
        out.state.copy_(dstate)


class _ChunksCall(ctypes.Structure):
    """``Call`` of chunks.cpp: pointers (0 for none) and numbers.

    Queries [X, R, T, D], keys [X, S, D], values [X, S, C], sums [X, R, T, C], states [X, C, rows].
    ``parents`` and ``factors`` are those of all ``monomials``, from which the state has the last
    ``rows``. ``dstate`` is the
    gradient of the state after all keys (``ends`` for one that is not 0), then of the first.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "state", "dsums", "weights")),
        *((name, ctypes.c_void_p) for name in ("log_decay", "coefficients", "parents", "factors")),
        *((name, ctypes.c_void_p) for name in ("sums", "last", "kept")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv", "dstate")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "queries", "keys", "width")),
        *((name, ctypes.c_int64) for name in ("channels", "monomials", "rows", "terms")),
        *((name, ctypes.c_int64) for name in ("chunk", "causal", "ends", "threads")),
    )


def _run(
    name: str,
    inputs: Columns,
    chunks: ChunksInCpp,
    given: dict[str, Tensor],
    outputs: dict[str, Tensor],
    dlast: Tensor | None = None,
) -> None:
    q, k, v, state, log_decay, _ = inputs
    tables = chunks.tables
    written = {
        name: x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        for name, x in outputs.items()
        if x.numel()
    }
    given = given | {"q": _tokens_first(q), "k": _tokens_first(k), "v": _tokens_first(v)}
    given |= {"weights": tables.weights, **_constants(tables, k.shape[1])}
    if state is not None:
        given["state"] = state
    if log_decay is not None:
        given["log_decay"] = log_decay.double()
    contiguous = {name: x.contiguous() for name, x in given.items() if x.numel()}
    cpp.run(
        name,
        _ChunksCall,
        contiguous | written,
        heads=len(q),
        groups=q.shape[2],
        queries=q.shape[3],
        keys=k.shape[2],
        width=q.shape[1],
        channels=v.shape[1],
        monomials=tables.unused + len(tables.weights),
        rows=len(tables.weights),
        terms=tables.degree + 1,
        chunk=chunks.length,
        causal=chunks.causal,
        ends=dlast is not None,
    )
    for name, x in written.items():
        if x is not outputs[name]:
            outputs[name].copy_(x)


def _tokens_first(x: Tensor) -> Tensor:
    """[X, D, ...] with a row of D per token."""
    return x.movedim(1, -1)


@functools.lru_cache(maxsize=64)
def _indices(width: int, degree: int) -> tuple[Tensor, Tensor]:
    parents, factors = monomial_factors(width, degree)
    with torch.inference_mode(False):
        return torch.from_numpy(parents), torch.from_numpy(factors)


def _constants(tables: Tables, width: int) -> dict[str, Tensor]:
    parents, factors = _indices(width, tables.degree)
    numbers = torch.tensor(tables.series.coefficients, dtype=torch.float64, device="cpu")
    return {"coefficients": numbers, "parents": parents, "factors": factors}
