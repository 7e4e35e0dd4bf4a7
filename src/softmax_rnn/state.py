"""The state of a finite series: all that is left of the keys and values seen so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from softmax_rnn.forms.row_sums import RowSums, compute_dtype
from softmax_rnn.spec import AttentionSpec
from softmax_rnn.symmetric import degrees, state_rows, state_size

# States smaller than this always fit; asking for the free memory costs more than they do.
_SMALL = 2**26


@dataclass(frozen=True)
class State:
    """What the recurrent form holds after some tokens, whatever their number.

    Attributes:
        spec: the specification that made it.
        sums: ``sum_s v_s monomials(k_s)^T`` (the stacked hidden states ``H^n`` of section 3.1 in
            the symmetric basis, transposed), with a last row ``sum_s monomials(k_s)`` where the
            spec has a row sum; [B, Hkv, E or E + 1, monomials], float32 or float64.
        visible: number of visible keys so far, for the length denominators; [B], int64.
        tokens: number of positions so far, hidden ones included.
    """

    spec: AttentionSpec
    sums: Tensor
    visible: Tensor
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.sums.nbytes + self.visible.nbytes

    def select(self, batch: Tensor) -> State:
        """The state of some rows of the batch, in the order of the indices ``batch`` [B']."""
        sums, visible = (x.index_select(0, batch.to(x.device)) for x in (self.sums, self.visible))
        return replace(self, sums=sums, visible=visible)

    def detach(self) -> State:
        """The same numbers, cut from the graph: for truncated backpropagation through time."""
        return replace(self, sums=self.sums.detach())

    def to(self, device: torch.device | str) -> State:
        """The same on another device."""
        return replace(self, sums=self.sums.to(device), visible=self.visible.to(device))


def check_state(state: State, spec: AttentionSpec, k: Tensor, v: Tensor) -> None:
    """Raise ``ValueError`` unless ``state`` is one of ``spec`` for keys and values like these."""
    if not isinstance(state, State):
        raise ValueError(f"state must be a softmax_rnn.State, not {type(state).__name__}.")
    if state.spec != spec:
        raise ValueError(f"The state was made by another spec: {state.spec}, not {spec}.")
    channels = v.shape[3] + (spec.row_sum is not None)
    shape = (*k.shape[:2], channels, state_rows(spec, k.shape[3]))
    if tuple(state.sums.shape) != shape:
        raise ValueError(
            f"The state's sums must have shape {list(shape)} for these inputs, "
            f"not {list(state.sums.shape)}."
        )
    dtype = compute_dtype(k.dtype)
    if state.sums.dtype != dtype or state.sums.device != k.device:
        raise ValueError(
            f"The state must be {dtype} on {k.device} for {k.dtype} inputs on {k.device}, "
            f"not {state.sums.dtype} on {state.sums.device}."
        )


def next_state(
    spec: AttentionSpec, state: State | None, sums: Tensor, mask: Tensor | None, keys: int
) -> State:
    """The state after ``keys`` more positions, of which ``mask`` [B, 1, 1, S] shows some."""
    seen = sums.new_full((sums.shape[0],), keys, dtype=torch.int64)
    if mask is not None:
        seen = mask.expand(*sums.shape[:1], 1, 1, keys).sum(dim=(1, 2, 3))
    if state is None:
        return State(spec, sums, seen, keys)
    return State(spec, sums, state.visible + seen, state.tokens + keys)


def check_finite(sums: RowSums, state: State | None, k: Tensor, v: Tensor) -> None:
    """Raise if a state holds no finite number any more, naming the token that did it.

    A number that is not finite reaches every later output, so that the outputs tell.

    Raises:
        FloatingPointError: with the index of the token, counted from the start of the state.
    """
    shown = sums.state if sums.numerator.numel() == 0 else sums.numerator
    if shown is None or torch.compiler.is_compiling() or shown.isfinite().all():
        return
    before = 0 if state is None else state.tokens
    if state is not None and not state.sums.isfinite().all():
        raise FloatingPointError(f"The state given holds NaN or infinity, after {before} tokens.")
    for name, x in (("key", k), ("value", v)):
        bad = (~x.isfinite()).any(-1).flatten(0, 1).any(0).nonzero()
        if len(bad):
            token = before + int(bad[0])
            raise FloatingPointError(f"The {name} of token {token} holds NaN or infinity.")
    if sums.state is not None and not sums.state.isfinite().all():
        largest = k.detach().norm(dim=-1).flatten(0, 1).amax(0)
        token = before + int(largest.argmax())
        raise FloatingPointError(
            f"The state overflows {sums.state.dtype} between tokens {before} and "
            f"{before + k.shape[2] - 1}; the longest key, of token {token}, has length "
            f"{largest.max().item():.3g}. Use a lower order, shorter keys or float64."
        )


def require_memory(spec: AttentionSpec, k: Tensor, v: Tensor) -> None:
    """Raise ``MemoryError`` if the state for such keys and values does not fit, nor its monomials.

    The error says how many bytes it takes and the largest order that fits.
    """

    def needed(order: int) -> int:
        of_order = replace(spec, order=order)
        return heads * size * state_size(of_order, k.shape[3], v.shape[3])

    heads, size = k.shape[0] * k.shape[1], compute_dtype(k.dtype).itemsize
    order = degrees(spec)[1]
    if needed(order) < _SMALL:
        return
    if k.device.type == "cuda":
        free = torch.cuda.mem_get_info(k.device)[0]
        free += torch.cuda.memory_reserved(k.device) - torch.cuda.memory_allocated(k.device)
    else:
        free = psutil.virtual_memory().available
    if _WORKING * needed(order) <= free:
        return
    fits = max((n for n in range(order) if _WORKING * needed(n) <= free), default=None)
    advice = "no order fits" if fits is None else f"the largest order that fits is {fits}"
    raise MemoryError(
        f"The state of order {order} takes {needed(order):,} bytes ({heads} heads, key width "
        f"{k.shape[3]}, value width {v.shape[3]}) and as much again to work with; "
        f"{free:,} bytes are free; {advice}."
    )


# The old and the new state, and the weighted one that queries read.
_WORKING = 3
