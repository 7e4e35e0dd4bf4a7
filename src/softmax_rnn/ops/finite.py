"""Overflow: an error that names its cause, in place of infinity or NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import RowSums, no_data, visible_keys
from softmax_rnn.ops.monomials import degrees
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State

Inputs = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


def check_sums(
    sums: RowSums,
    spec: AttentionSpec,
    state: State | None,
    inputs: Inputs,
    features: Tensor,
    mask: Tensor | None,
) -> None:
    """Raise if the sums of a finite series, or its state, overflow.

    A number that is not finite reaches every output that depends on it, so the outputs are checked.
    No output may depend on the last keys, so their powers are checked by size. Without a state, NaN
    or infinity in the inputs propagates to the outputs, as in softmax. ``state`` is the initial
    one, ``features`` are the keys as a state holds them.

    Raises:
        OverflowError: with the size of the inputs, or of the key that overflows a state.
        FloatingPointError: for NaN or infinity in a state or what is added to it, with the index
            of the token, counted from the start of the state.
    """
    if no_data(sums.numerator):
        return
    finite, stateful = _finite(sums.numerator) and _finite(sums.weight_sum), sums.state is not None
    if finite and not stateful:
        return
    q, k, v = (x.detach() for x in inputs)
    hidden_nan = mask is not None and not _finite(v)
    if mask is not None:  # a hidden key may hold anything
        shown = visible_keys(mask, k.shape[1])
        k, v, features = (x.masked_fill(~shown, 0.0) for x in (k, v, features.detach()))
    if finite and not _out_of_range(sums, spec, features, v):
        return
    if stateful or state is not None:
        _check_state(sums, spec, state, features, v)
    if not finite and not hidden_nan and all(_finite(x) for x in (q, k, v)):
        raise OverflowError(
            f"The sums of power {spec.order} overflow {sums.numerator.dtype}: {_sizes((q, k, v))}, "
            f"products of queries and keys are multiplied by {spec.score_scale(q.shape[-1]):.3g}. "
            "Use smaller ones, a lower order or float64."
        )


def check_output(out: Tensor, dtype: torch.dtype, inputs: Inputs) -> None:
    """Raise ``OverflowError`` if the outputs of finite inputs are beyond the range of ``dtype``."""
    if no_data(out) or not out.numel():
        return
    largest = out.detach().abs().amax().item()
    if largest > torch.finfo(dtype).max and all(_finite(x) for x in inputs):
        raise OverflowError(
            f"The largest output, {largest:.3g}, overflows {dtype}, whose largest number is "
            f"{torch.finfo(dtype).max:.3g}: {_sizes(inputs)}. Use a wider type, a denominator or a "
            "norm."
        )


def _sizes(inputs: Inputs) -> str:
    longest = (x.detach().double().norm(dim=-1).amax().item() for x in inputs)
    return "queries are up to {:.3g} long, keys {:.3g} and values {:.3g}".format(*longest)


def _check_state(
    sums: RowSums, spec: AttentionSpec, state: State | None, k: Tensor, v: Tensor
) -> None:
    before = 0 if state is None else state.tokens
    if state is not None and not state.sums.isfinite().all():
        raise FloatingPointError(f"The state given holds NaN or infinity, after {before} tokens.")
    for name, x in (("key", k), ("value", v)):
        bad = (~x.isfinite()).any(-1).flatten(0, 1).any(0).nonzero()
        if len(bad):
            token = before + int(bad[0])
            raise FloatingPointError(f"The {name} of token {token} holds NaN or infinity.")
    if sums.state is not None and not sums.state.isfinite().all():
        largest = k.detach().abs().amax(-1).flatten(0, 1).amax(0)
        token = before + int(largest.argmax())
        raise OverflowError(
            f"The state overflows {sums.state.dtype} between tokens {before} and "
            f"{before + k.shape[2] - 1}; the longest key, of token {token}, has entries of "
            f"{largest.max().item():.3g}. Use a lower order, shorter keys or float64."
        )
    longest = float(k.abs().max()) if k.numel() else 0.0
    if sums.state is not None and _vanishes(spec, longest, torch.finfo(sums.state.dtype).tiny):
        raise FloatingPointError(
            f"Power {spec.order} of keys of at most {longest:.3g} vanishes in a state of "
            f"{sums.state.dtype}. Use longer keys or float64."
        )


def _out_of_range(sums: RowSums, spec: AttentionSpec, k: Tensor, v: Tensor) -> bool:
    """Whether a key's powers times its value may exceed the range of the state."""
    if sums.state is None or not k.numel() or not v.numel():
        return False
    largest = [float(x.detach().abs().max()) for x in (k, v)]
    limits, order = torch.finfo(sums.state.dtype), degrees(spec)[1]
    size = order * math.log(max(1.0, largest[0])) + math.log(max(1.0, largest[1]) * k.shape[2])
    return not size < math.log(limits.max) or _vanishes(spec, largest[0], limits.tiny)


def _vanishes(spec: AttentionSpec, longest: float, tiny: float) -> bool:
    """Whether the powers of small keys underflow where a factor of the scores cancels."""
    return spec.scale_free and 0 < longest ** degrees(spec)[1] < tiny


def _finite(x: Tensor | None) -> bool:
    if x is None:
        return True
    x = x.detach()
    # One pass; only a sum that itself overflows needs a check of every number.
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())
