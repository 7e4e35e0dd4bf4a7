"""The arguments of ``attention()`` as one structure, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import compute_dtype, no_data
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State, check_state


@dataclass(slots=True)
class Call:
    """The arguments of :func:`softmax_rnn.attention`, which describes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    causal: bool = True
    mask: Tensor | None = None
    log_decay: Tensor | None = None
    coefficients: Tensor | None = None
    state: State | None = None
    return_state: bool = False
    padding: bool = False
    input_gate: Tensor | None = None
    output_gate: Tensor | None = None
    length_power: Tensor | None = None
    sink: Tensor | None = None
    outside_scale: Tensor | None = None
    outside_q: Tensor | None = None
    outside_k: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    backward_log_decay: Tensor | None = None

    @property
    def both_directions(self) -> bool:
        """Whether later keys have weights of their own: then each direction is a causal call."""
        return not self.causal and self.spec.positional

    @property
    def stateful(self) -> bool:
        """Whether a state is given or returned."""
        return self.state is not None or self.return_state


def check(call: Call) -> None:
    """Raise ``ValueError`` for arguments that do not fit each other, whatever their numbers are."""
    spec, q, k, v = call.spec, call.q, call.k, call.v
    check_tensors(q, k, v, call.causal)
    mask = checked_mask(call.mask, q, k)
    check_extras(call)
    check_outside(call.outside_q, call.outside_k, q, k, spec)
    if spec.order is not None:
        check_series(spec, compute_dtype(q.dtype))
    _check_decays(call)
    if call.state is not None:
        check_state(call.state, spec, k, v, call.outside_k)
    if call.stateful:
        check_per_key(mask)
    elif call.padding and spec.window is not None:
        check_per_key(mask, "padding=True")


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Check shapes, dtypes and devices of queries, keys and values."""
    # Asking a tensor for these takes time, which matters in decoding.
    shapes, expected = [], None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}.")
        shape, dtype, device = x.shape, x.dtype, x.device
        if len(shape) != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], not {list(shape)}.")
        if dtype not in _DTYPES:
            allowed = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise ValueError(
                f"{name} must be of a floating-point dtype, not {dtype}. Allowed: {allowed}."
            )
        if x.layout is not torch.strided:
            raise ValueError(f"{name} must be dense (torch.strided), not {x.layout}.")
        expected = expected or (dtype, device)
        if (dtype, device) != expected:
            raise ValueError(
                f"q, k and v must share dtype and device; q has {q.dtype} on {q.device}, "
                f"{name} has {dtype} on {device}."
            )
        if not (shape[1] and shape[3]):
            raise ValueError(f"{name} must have at least one head and width 1, not {list(shape)}.")
        shapes.append(shape)
        if shape[0] != shapes[0][0]:
            raise ValueError(f"{name} has batch {shape[0]}, q has {shapes[0][0]}.")
    (_, heads, queries, width), (_, kv_heads, keys, key_width), of_values = shapes
    if width != key_width:
        raise ValueError(f"q has width {width}, k has {key_width}: they must be equal.")
    if kv_heads != of_values[1] or keys != of_values[2]:
        raise ValueError(
            f"k and v must share heads and length; k is {list(k.shape)}, v is {list(v.shape)}."
        )
    if heads % kv_heads:
        raise ValueError(f"The {kv_heads} key/value heads must divide the {heads} query heads.")
    if causal and queries > keys:
        raise ValueError(
            f"causal=True aligns the queries to the last keys, but there are {queries} queries "
            f"and only {keys} keys; use causal=False with a mask."
        )


# The highest orders of Taylor series whose coefficients 1/n! are normal numbers.
_TAYLOR_ORDERS = {torch.float32: 33, torch.float64: 170}


def check_series(spec: AttentionSpec, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if coefficients of a series underflow in ``dtype``, that of its sums."""
    if spec.series == "taylor" and (spec.order or 0) > _TAYLOR_ORDERS[dtype]:
        raise ValueError(
            f"The coefficients of order={spec.order} fall to 1/{spec.order}!, which underflows "
            f"{dtype}: its highest powers would be missing. Use an order up to "
            f"{_TAYLOR_ORDERS[dtype]}{' or float64' if dtype == torch.float32 else ''}."
        )
    least = min([1.0, *[abs(a) for a in spec.coefficients or () if a]])
    if least < torch.finfo(dtype).tiny:
        raise ValueError(
            f"The coefficient {least:.3g} of the polynomial underflows {dtype}. Set it to 0"
            f"{', or use float64' if dtype == torch.float32 else ''}."
        )


def require_first_keys(spec: AttentionSpec, mask: Tensor | None) -> None:
    """Raise ``ValueError`` if the first keys that rows of a full mask see may differ."""
    if spec.global_keys and mask is not None and mask.shape[-2] > 1 and mask.stride(-2):
        raise ValueError(
            f"global_keys={spec.global_keys} needs a mask of keys, [B, T] or [B, 1, 1, S], not one "
            "per query (of packed sequences, for example), whose first keys differ. A model that "
            "is exported or compiled needs an attention_mask, since it looks for packed sequences."
        )


def checked_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the mask with four dimensions, each either 1 or that of [B, H, T, S]."""
    if mask is None:
        return None
    full = [*q.shape[:3], k.shape[2]]
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a boolean torch.Tensor, not {type(mask).__name__}.")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean (True = visible), not {mask.dtype}.")
    if mask.device != q.device:
        raise ValueError(f"mask is on {mask.device}, q on {q.device}.")
    if mask.ndim > 4 or any(
        have != 1 and have != want  # torch.compile misreads `in` where sizes are symbols
        for have, want in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        of_keys = list(mask.shape) == [full[0], full[3]]  # as transformers has it
        raise ValueError(
            f"mask {list(mask.shape)} cannot be broadcast to [B, H, T, S] = {full}."
            + (" Give a mask of keys, [B, S], as mask[:, None, None]." if of_keys else "")
        )
    return mask[(None,) * (4 - mask.ndim)]


def check_extras(call: Call) -> None:
    """Check the tensors for all heads or tokens that only some specs take."""
    spec, q = call.spec, call.q
    batch, heads, queries, _ = q.shape
    kv_heads, keys, width = call.v.shape[1:]
    gate: Any = call.output_gate
    gate_shape = batch, heads, queries
    per_channel = isinstance(gate, Tensor) and gate.ndim == 4
    # Name: whether the spec uses it, its shape, whether it is required.
    used: dict[str, tuple[bool, tuple[int, ...], bool]] = {
        "input_gate": (spec.input_gate, (batch, kv_heads, keys), True),
        "output_gate": (
            spec.output_gate != "none",
            (*gate_shape, width) if per_channel else gate_shape,
            True,
        ),
        "length_power": (spec.denominator == "learned_length", (heads,), True),
        "coefficients": (spec.learned_coefficients, (heads, 1 + (spec.order or 0)), True),
        "sink": (spec.denominator == "sum_plus_sink", (heads,), True),
        "outside_scale": (spec.outside == "series", (heads,), False),
        "norm_weight": (spec.norm in ("rms", "layer"), (width,), False),
        "norm_bias": (spec.norm == "layer", (width,), False),
    }
    for name, (taken, shape, required) in used.items():
        check_extra(name, getattr(call, name), taken, shape, q, required)


def check_extra(
    name: str,
    value: Tensor | None,
    used: bool,
    shape: tuple[int, ...],
    q: Tensor,
    required: bool = True,
) -> None:
    """Check a tensor that only some specs take."""
    if value is None:
        if used and required:
            raise ValueError(f"This spec needs {name}, of shape {list(shape)}; none was given.")
        return
    if not used:
        raise ValueError(f"{name} was given, but this spec does not use one.")
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, not {type(value).__name__}.")
    if value.is_complex():
        raise ValueError(f"{name} must be of real numbers, not of {value.dtype}.")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(value.shape)}.")
    if value.device != q.device:
        raise ValueError(f"{name} is on {value.device}, q on {q.device}.")


def check_per_key(mask: Tensor | None, what: str = "a state") -> None:
    """Raise ``ValueError`` unless every query and head sees the same keys, as a state does."""
    if mask is not None and not is_per_key(mask):
        raise ValueError(
            f"With {what} every query and head sees the same keys: mask must be broadcastable to "
            f"[B, 1, 1, S], not {list(mask.shape)}. form='blocked' (in a model: a key/value cache) "
            "takes any mask, without a state."
        )


def is_per_key(mask: Tensor) -> bool:
    """Whether every query and head sees the same keys of a mask, broadcast to [B, H, T, S]."""
    return per_key(mask.shape)


def per_key(shape: Sequence[int]) -> bool:
    """Whether a mask of this shape is the same for every query and head."""
    return (1, 1, 1, *shape)[-3:-1] == (1, 1)


def _check_decays(call: Call) -> None:
    """Raise ``ValueError`` for decays or a window that do not fit the spec and the keys."""
    spec, k, decayed = call.spec, call.k, call.spec.decay != "none"
    if call.both_directions:
        if call.stateful:
            raise ValueError(
                "With causal=False a decay or a window has no state: later keys would need one of "
                "their own. Leave state and return_state out."
            )
        if call.q.shape[2] != k.shape[2]:
            raise ValueError(
                "With causal=False a decay or a window needs queries and keys of the same tokens, "
                f"not {call.q.shape[2]} queries and {k.shape[2]} keys."
            )
    elif call.causal and call.backward_log_decay is not None:
        raise ValueError("backward_log_decay is of later keys: it needs causal=False.")
    shapes = {"head": k.shape[1:2], "token": k.shape[:3], "channel": k.shape}
    for name in ("log_decay", "backward_log_decay"):
        value, shape = getattr(call, name), tuple(shapes.get(spec.decay, ()))
        check_extra(name, value, decayed, shape, k, required=name == "log_decay")
        if value is not None and not value.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point dtype, not {value.dtype}.")


def check_not_growing(log_decay: Tensor, name: str = "log_decay") -> None:
    """Raise ``ValueError`` for a log decay above 0; NaN passes, as in other inputs."""
    if not no_data(log_decay) and (log_decay > 0).any():
        raise ValueError(
            f"{name} must be <= 0; the largest is {float(log_decay.detach().max()):.3g}."
        )


def check_outside(
    outside_q: Tensor | None, outside_k: Tensor | None, q: Tensor, k: Tensor, spec: AttentionSpec
) -> None:
    """Check the queries and keys of a series outside a window."""
    widths = []
    for name, x, inside in (("q", outside_q, q), ("k", outside_k, k)):
        given = isinstance(x, Tensor) and x.ndim == 4 and x.shape[3] > 0
        width = x.shape[3] if given and x is not None else inside.shape[3]
        shape = (*inside.shape[:3], width)
        check_extra(f"outside_{name}", x, spec.outside == "series", shape, q, required=False)
        if x is not None and x.dtype != q.dtype:
            raise ValueError(f"outside_{name} must be {q.dtype}, as q is, not {x.dtype}.")
        widths.append(width)
    if widths[0] != widths[1]:
        raise ValueError(
            f"outside_q has width {widths[0]}, outside_k has {widths[1]} (by default those of q "
            "and k): they must be equal."
        )
    if spec.decay == "channel" and widths[0] != q.shape[3]:
        raise ValueError(
            f"outside_q and outside_k have width {widths[0]}, q and k have {q.shape[3]}: with "
            "decay='channel' they must be equal, as the decay has one channel for each."
        )
