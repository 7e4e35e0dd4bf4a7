"""The state of a finite series: a sum over all earlier keys and values (section 3.1)."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softmax_rnn._utils.errors import differences
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.ops.compiler import constant_when_compiled
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.chunks.magnitudes import powers
from softmax_rnn.ops.forms.row_sums import compute_dtype, no_data, visible_keys
from softmax_rnn.ops.monomials import cumulative_dimension, degrees, state_rows, state_size
from softmax_rnn.ops.series import MAX_RADIUS, order_for
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.work import chunk_length, heads_per_step, sizes_of

# The tolerance of the Taylor series that the error for exp suggests.
_TOLERANCE = 1e-3
# Bytes of the largest state that it suggests.
_REASONABLE = 2**28
# Fewer bytes are assumed to fit: reading the free memory takes longer than using it.
_SMALL = 2**26


class KeptKeys(NamedTuple):
    """Keys that a state keeps as they are, if a series covers those outside a window.

    Attributes:
        k: after the feature map, [B, Hkv, N, D].
        v: [B, Hkv, N, E].
        visible: [B, N]; there are fewer keys than N while the sequence is short.
        log_decay: [B, Hkv, N] or [B, Hkv, N, D], ``None`` without a decay: of recent keys their
            own; of first keys how far they have faded when the keys in ``recent`` begin.
        outside_k: the keys outside the window, [B, Hkv, N, F]; ``None`` if they are the same, and
            of first keys, which are never outside.
    """

    k: Tensor
    v: Tensor
    visible: Tensor
    log_decay: Tensor | None = None
    outside_k: Tensor | None = None


@dataclass(frozen=True, eq=False)
class State:
    """The state after some tokens; its size does not depend on their number.

    Attributes:
        spec: the specification that it belongs to.
        sums: ``sum_s v_s monomials(k_s)^T`` (the stacked hidden states ``H^n`` of section 3.1 in
            the symmetric basis, transposed), with a last row ``sum_s monomials(k_s)`` if the
            spec has a row sum; [B, Hkv, E or E + 1, monomials]. The dtype is float64 for float64
            inputs, otherwise float32. In float32, sums stop growing after about 2^24 = 16.8 million
            tokens.
        magnitudes: ``sum_s |k_sd|^n`` for the powers n > 0 of the spec and the channels d, which
            fade as the sums do: their rounding errors follow from what was added
            (``magnitudes.py``); [B, Hkv, powers, D]. ``None`` if no row sum can cancel.
        largest: the largest absolute value so far, after its gate, [B, Hkv]; beside magnitudes.
        visible: number of visible keys so far, for the length denominators; [B], int64.
        tokens: number of positions so far, hidden ones included; an int64 tensor in a state at
            :meth:`fixed` addresses.
        recent: the keys of the last window, which ``sums`` does not contain yet; ``None`` for a
            spec without a window.
        first: the first keys (``global_keys``) that have left the window, which ``sums`` never
            contains; ``None`` for a spec without them.
        inputs: of a layer with a short convolution, its last inputs [B, width - 1, channels].
    """

    spec: AttentionSpec
    sums: Tensor
    visible: Tensor
    tokens: int | Tensor
    magnitudes: Tensor | None = None
    largest: Tensor | None = None
    recent: KeptKeys | None = None
    first: KeptKeys | None = None
    inputs: Tensor | None = None

    def __post_init__(self) -> None:
        count = self.tokens
        if isinstance(count, bool) or not isinstance(count, int | Tensor):
            raise ValueError(f"A state's tokens must be a number of tokens, not {count!r}.")
        if isinstance(count, int) and count < 0:
            raise ValueError(f"A state's tokens must be 0 or more, not {count}.")

    def __repr__(self) -> str:
        """One line, without the tensors."""
        return f"State({self.spec}, {int(self.tokens):,} tokens, {bytes_text(self.nbytes)})"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(x.nbytes for x in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names; the first dimension of each is the batch."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, KeptKeys):
                found |= {f"{field.name}.{name}": x for name, x in value._asdict().items()}
            elif field.name != "tokens":
                found[field.name] = value
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    @classmethod
    def from_tensors(
        cls, spec: AttentionSpec, tokens: int | Tensor, tensors: dict[str, Tensor]
    ) -> State:
        """The inverse of ``tensors``."""
        own: dict[str, Any] = {name: x for name, x in tensors.items() if "." not in name}
        kept: dict[str, dict[str, Tensor]] = {}
        for name in tensors.keys() - own.keys():
            part, _, field = name.partition(".")
            kept.setdefault(part, {})[field] = tensors[name]
        own |= {part: KeptKeys(**named) for part, named in kept.items()}
        return cls(spec, tokens=tokens, **own)

    def check_counts(self, width: int | None = None) -> None:
        """Raise ``ValueError`` unless ``visible`` and the magnitudes are what the spec needs.

        ``width`` is that of keys, any width if it is not given.
        """
        found = [x if x is None else list(x.shape) for x in (self.magnitudes, self.largest)]
        for x in (self.magnitudes, self.largest):
            if x is not None and (x.dtype, x.device) != (self.sums.dtype, self.sums.device):
                raise ValueError(
                    "The state's magnitudes and largest must be of the dtype and device of its "
                    f"sums, {self.sums.dtype} on {self.sums.device}, not {x.dtype} on {x.device}."
                )
        counts = self.visible.dtype, self.visible.device
        same = counts == (torch.int64, self.sums.device)
        if not same or self.visible.shape != self.sums.shape[:1]:
            raise ValueError(
                f"The state's visible must be {list(self.sums.shape[:1])} of torch.int64 on "
                f"{self.sums.device}, not {list(self.visible.shape)} of {self.visible.dtype} on "
                f"{self.visible.device}."
            )
        needed: list[list[int] | None] = [None, None]
        if self.spec.sums_can_cancel:
            heads = list(self.sums.shape[:2])
            if width is None and self.magnitudes is not None:
                width = self.magnitudes.shape[-1]
            needed = [[*heads, len(powers(self.spec)), width or 0], heads]
        if found != needed:
            raise ValueError(
                f"The shapes of the state's magnitudes and largest must be {needed}, not {found}. "
                "States that were saved by earlier versions have none (None): compute them again "
                "from their tokens."
            )

    def select(self, batch: Tensor) -> State:
        """The state of some rows of the batch, in the order of the indices ``batch`` [B']."""
        return self._map(lambda x: x.index_select(0, batch.to(x.device)))

    def detach(self) -> State:
        """The state without its autograd graph, for truncated backpropagation through time."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> State:
        """The state on another device."""
        return self._map(lambda x: x.to(device))

    def fixed(self) -> State:
        """A copy whose tensors keep their addresses, for compiled steps that update it."""
        copy = self._map(Tensor.clone)
        tokens = torch.as_tensor(self.tokens, device=self.sums.device).clone()
        for tensor in (*copy.tensors.values(), tokens):
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(tensor)
        return replace(copy, tokens=tokens)

    def update_(self, new: State) -> None:
        """Overwrite the tensors of a :meth:`fixed` state by those of another of its shapes.

        Raises:
            ValueError: if this state is not fixed, or the other one has another spec or shapes.
        """
        if not isinstance(self.tokens, Tensor):
            raise ValueError("update_ overwrites a fixed state: make one with State.fixed().")
        shapes = [{name: x.shape for name, x in s.tensors.items()} for s in (self, new)]
        if self.spec != new.spec or shapes[0] != shapes[1]:
            raise ValueError(
                "A state is overwritten by one of its own spec and shapes: "
                f"{self.spec} with {shapes[0]}, not {new.spec} with {shapes[1]}."
            )
        for mine, other in zip(self.tensors.values(), new.tensors.values(), strict=True):
            mine.copy_(other)
        self.tokens.copy_(torch.as_tensor(new.tokens))

    def _map(self, function: Callable[[Tensor], Tensor]) -> State:
        changed = {name: function(x) for name, x in self.tensors.items()}
        return self.from_tensors(self.spec, self.tokens, changed)


def check_state(
    state: State, spec: AttentionSpec, k: Tensor, v: Tensor, outside_k: Tensor | None
) -> None:
    """Raise ``ValueError`` unless ``state`` belongs to ``spec`` and fits these keys and values."""
    if not isinstance(state, State):
        raise ValueError(f"state must be a softmax_rnn.State, not {type(state).__name__}.")
    parts = ("sums", Tensor), ("visible", Tensor), ("magnitudes", Tensor), ("largest", Tensor)
    for name, kind in (*parts, ("recent", KeptKeys), ("first", KeptKeys)):
        part = getattr(state, name)
        if not isinstance(part, kind) and not (part is None and name not in ("sums", "visible")):
            raise ValueError(
                f"The state's {name} must be a {kind.__name__}, not {type(part).__name__}."
            )
    if not state.spec == spec:  # torch.compile cannot trace != here
        raise ValueError(
            "The state belongs to another spec "
            f"({differences(state.spec.to_dict(), spec.to_dict(), 'here')})."
        )
    channels = v.shape[3] + (spec.row_sum is not None)
    width = (k if outside_k is None else outside_k).shape[3]
    shape = (*k.shape[:2], channels, state_rows(spec, width))
    if tuple(state.sums.shape) != shape:
        raise ValueError(
            f"The state's sums must have shape {list(shape)} for these inputs, "
            f"not {list(state.sums.shape)}."
        )
    state.check_counts(width)
    for name, count in (("recent", spec.window or 0), ("first", spec.global_keys)):
        kept = getattr(state, name)
        found = 0 if kept is None else kept.k.shape[2]
        if found != count:
            raise ValueError(f"The state must hold {count} {name} keys, not {found}.")
        if isinstance(kept, KeptKeys):
            sizes = {"k": k.shape[3], "v": v.shape[3]}
            _check_kept(name, kept, (*k.shape[:2], count), sizes, k.device)
    if state.recent is not None:
        widths = [
            [None if x is None else x.shape[3] for x in keys]
            for keys in ((k, outside_k), (state.recent.k, state.recent.outside_k))
        ]
        if widths[0] != widths[1]:
            raise ValueError(
                "The state's keys must have the widths of k and outside_k, "
                f"{widths[0]}, not {widths[1]} (None: the same keys inside and outside the window)."
            )
    dtype = compute_dtype(k.dtype)
    if state.sums.dtype != dtype or state.sums.device != k.device:
        raise ValueError(
            f"The state must be {dtype} on {k.device} for {k.dtype} inputs on {k.device}, "
            f"not {state.sums.dtype} on {state.sums.device}."
        )


def _check_kept(
    name: str, kept: KeptKeys, heads: tuple[int, ...], widths: dict[str, int], device: torch.device
) -> None:
    """Raise ``ValueError`` unless kept keys [B, Hkv, N] have one shape: C++ reads their memory."""
    for field, x in kept._asdict().items():
        if x is None and field in ("log_decay", "outside_k"):
            continue
        shape = (heads[0], heads[2]) if field == "visible" else heads
        shape += (widths[field],) if field in widths else ()
        found = list(x.shape) if isinstance(x, Tensor) else None
        right = found is not None and found[: len(shape)] == list(shape) and x.device == device
        if field == "visible" or field in widths:
            right = right and x.ndim == len(shape)
        boolean = getattr(x, "dtype", None) == torch.bool
        if not right or boolean != (field == "visible") or x.is_complex():
            given = repr(x) if found is None else f"{found} of {x.dtype} on {x.device}"
            kind = "booleans" if field == "visible" else "real numbers"
            raise ValueError(
                f"The state's {name}.{field} must begin with {list(shape)} and hold {kind} on "
                f"{device}, not {given}."
            )


def largest_values(v: Tensor, mask: Tensor | None, state: State | None) -> Tensor:
    """The largest absolute value of each head of v [B, Hkv, S, E] and of a state, [B, Hkv]."""
    v = v.detach()
    if mask is not None:  # hidden values may be anything
        v = v.masked_fill(~visible_keys(mask, v.shape[1]), 0.0)
    found = F.pad(v.abs().flatten(2), (0, 1)).amax(2).to(compute_dtype(v.dtype))
    return found if state is None or state.largest is None else found.maximum(state.largest)


def next_state(
    spec: AttentionSpec,
    state: State | None,
    sums: Tensor,
    magnitudes: Tensor | None,
    largest: Tensor | None,
    recent: KeptKeys | None,
    first: KeptKeys | None,
    mask: Tensor | None,
    keys: int,
) -> State:
    """The state after ``keys`` more positions; ``mask`` [B, 1, 1, S] says which are visible."""
    if mask is not None:
        visible = mask.expand(*sums.shape[:1], 1, 1, keys).sum(dim=(1, 2, 3))
        visible = visible if state is None else state.visible + visible
    elif state is not None:
        visible = state.visible + keys
    else:
        visible = sums.new_full((sums.shape[0],), keys, dtype=torch.int64)
    tokens = keys if state is None else state.tokens + keys
    largest = None if magnitudes is None else largest
    return State(spec, sums, visible, tokens, magnitudes, largest, recent, first)


def require_state(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, asked: bool) -> None:
    """Raise ``ValueError`` for a spec without a state; the message suggests a Taylor order.

    ``asked`` is whether only the form that was asked for needs a state.
    """
    if spec.order is not None or spec.clamp is not None or spec.hiding_window is not None:
        degrees(spec)
        return
    if no_data(q):
        raise ValueError("The series 'exp' has infinitely many powers and so no finite state.")
    features = [FEATURE_MAPS[spec.feature_map](x.detach().double()) for x in (q, k) if x.numel()]
    longest = [x.norm(dim=-1).amax().item() for x in features]
    radius = abs(spec.score_scale(q.shape[-1])) * math.prod(longest)
    advice = f"for these inputs |score| <= {radius:.3g}, and no Taylor series near to exp on that "
    advice += "range has a state of a reasonable size"
    if radius <= MAX_RADIUS:
        order = order_for(_TOLERANCE, radius)
        rows = cumulative_dimension(features[-1].shape[-1] if features else k.shape[-1], order)
        sums = rows * (v.shape[-1] + int(spec.row_sum is not None))
        size = compute_dtype(k.dtype).itemsize * k.shape[0] * k.shape[1] * sums
        near = f"order={order} is within {_TOLERANCE} of exp (remainder_bound)"
        if size <= _REASONABLE:
            advice = f"its Taylor series has one: for these inputs |score| <= {radius:.3g}, where "
            advice += f"series='taylor' with {near}, with a state of {bytes_text(size)}"
        else:
            advice += f": {near}, with one of {bytes_text(size)}"
    message = f"The series 'exp' has infinitely many powers and so no finite state; {advice}."
    raise ValueError(message + (" Without a state, use form='auto'." if asked else ""))


def is_small(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether states and working memory of the chunked form are too small to ask for memory."""
    return _bytes_needed(spec, q, k, v) < _SMALL


def has_memory(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is free memory for the states of the chunked form and its working memory."""
    return is_small(spec, q, k, v) or _bytes_needed(spec, q, k, v) <= _free_bytes(k.device)


def require_memory(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ``MemoryError`` unless :func:`has_memory`; the message names the largest order."""
    if has_memory(spec, q, k, v):
        return
    order = degrees(spec)[1]
    lower = (n for n in range(order - 1, -1, -1) if has_memory(replace(spec, order=n), q, k, v))
    largest = next(lower, None)
    advice = "no order fits" if largest is None else f"the largest order that fits is {largest}"
    heads, size = k.shape[0] * k.shape[1], compute_dtype(k.dtype).itemsize
    state = heads * size * state_size(spec, k.shape[3], v.shape[3])
    raise MemoryError(
        f"The state of order {order} takes {state:,} bytes ({heads} heads, key width {k.shape[3]}, "
        f"value width {v.shape[3]}), with working memory "
        f"{_bytes_needed(spec, q, k, v):,} bytes; {_free_bytes(k.device):,} bytes are "
        f"free; {advice}."
    )


def require_memory_to_keep(spec: AttentionSpec, keys: Sequence[Tensor | None]) -> None:
    """Raise ``MemoryError`` unless the keys that a state keeps fit the free memory.

    ``keys`` are the tensors kept of each key, [B, Hkv, S, ...].
    """
    assert spec.window is not None
    count = spec.window + spec.global_keys
    given = [x for x in keys if x is not None]
    each = sum(x.element_size() * x[:, :, :1].numel() for x in given)
    if (needed := count * each) < _SMALL or needed <= (free := _free_bytes(given[0].device)):
        return
    raise MemoryError(
        f"A state keeps all keys of the window: window={spec.window} and global_keys="
        f"{spec.global_keys} take {needed:,} bytes, {each:,} for each; {free:,} bytes are free. "
        "Use a narrower window, or no state."
    )


def _bytes_needed(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Bytes of old, new and weighted state, a chunk's monomials, and the backward pass's states."""
    heads, groups = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1]
    chunk = chunk_length(sizes_of(spec, q, k, v))
    together = heads_per_step(spec, k.shape[3], chunk, groups, k.device.type)
    rows = cumulative_dimension(k.shape[3], degrees(spec)[1])
    length = min(chunk, k.shape[2])
    monomials = 2 * min(together, heads) * rows * length * (groups + 1)  # and their gradients
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    states = 3 + (k.shape[2] // chunk if trained else 0)
    state = heads * state_size(spec, k.shape[3], v.shape[3])
    return compute_dtype(k.dtype).itemsize * (monomials + states * state)


# A compiled model keeps the choice of the time of compilation.
@constant_when_compiled
def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = _available_memory()
    group = Path("/sys/fs/cgroup")  # a container's limit, if there is one
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return free


def _available_memory() -> int:
    """Bytes of available memory; the installed memory if the system does not report it."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    if found:
        return 1024 * int(found[1])
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
