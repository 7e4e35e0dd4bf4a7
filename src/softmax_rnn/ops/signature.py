"""What the choice of the code that computes a call depends on: everything but its numbers.

Calls with equal signatures are alike: a check that passed for one passes for the other. Decoding
with keys and values adds a key in each call. So that not every token has a signature of its own,
the number of keys of a single query is rounded down to a power of two.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softmax_rnn.ops.forms.row_sums import PLAIN
from softmax_rnn.ops.inputs import Call, per_key
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import KeptKeys, State

Numbers = Literal["yes", "traced", "no"]


class Signature(NamedTuple):
    """What the choice depends on.

    Attributes:
        spec: the attention.
        form: the form that was asked for, or ``auto``.
        causal: whether queries see only keys up to their own position.
        q: the shape of the queries [B, H, T, D].
        k: that of the keys, with the number of keys of a single query rounded down to a power of
            two (unless a state is given or returned); likewise ``v``.
        types: the dtypes and devices of queries, keys and values.
        mask: what is checked of the mask (:func:`_checked`); ``None`` without one.
        others: what is checked of each other tensor (:func:`_others`), likewise.
        state: what is checked of a given state, likewise.
        return_state: whether a state is returned.
        padding: whether hidden tokens are padding.
        part: whether this is a part of another call, whose arguments are checked.
        trained: whether queries, keys or values need a gradient: then states are kept for it.
        derivative: whether the result may be differentiated.
        autocast: whether autocast is on, or may be.
        threads: of PyTorch.
        numbers: whether the tensors' numbers can be read: ``yes``; ``traced`` by
            ``torch.compile``; or ``no``, in transforms of ``torch.func`` and other subclasses of
            tensors.
        open: whether ``torch.export`` leaves the number of queries or keys open. Then the sizes are
            those of its example: a choice that depended on others would limit them.
    """

    spec: AttentionSpec
    form: str
    causal: bool
    q: torch.Size
    k: torch.Size
    v: torch.Size
    types: tuple[Any, ...]
    mask: tuple[Any, ...] | None
    others: tuple[Any, ...]
    state: tuple[Any, ...] | None
    return_state: bool
    padding: bool
    part: bool
    trained: bool
    derivative: bool
    autocast: bool
    threads: int
    numbers: Numbers
    open: bool = False

    @property
    def queries(self) -> int:
        """Their number, T."""
        return self.q[2]

    @property
    def keys(self) -> int:
        """Their number, S."""
        return self.k[2]

    @property
    def width(self) -> int:
        """That of queries and keys, D."""
        return self.q[3]

    @property
    def dtype(self) -> torch.dtype:
        """That of the queries, keys and values."""
        dtype: torch.dtype = self.types[0]
        return dtype

    @property
    def device(self) -> str:
        """The type of their device."""
        kind: str = self.types[1].type
        return kind

    @property
    def stateful(self) -> bool:
        """Whether a state is given or returned."""
        return self.return_state or self.state is not None

    @property
    def mask_of_keys(self) -> bool:
        """Whether every query and head sees the same keys."""
        return self.mask is None or per_key(self.mask[0])


def signature(call: Call, form: str = "auto") -> Signature:
    """The signature of a call whose numbers can be read."""
    return signature_of(call, form, False, torch.get_num_threads(), "yes")


def readable(call: Call) -> bool:
    """Whether queries, keys and values have numbers, on this device."""
    plain = type(call.q) in PLAIN and type(call.k) in PLAIN and type(call.v) in PLAIN
    return plain and not call.q.is_meta


def signature_of(call: Call, form: str, part: bool, threads: int, numbers: Numbers) -> Signature:
    """The signature of a call; ``part`` and the others are as in :class:`Signature`."""
    q, k, v, state, decay = call.q, call.k, call.v, call.state, call.log_decay
    dtype, device = q.dtype, q.device
    grad = torch.is_grad_enabled()
    trained = grad and (q.requires_grad or k.requires_grad or v.requires_grad)
    before = getattr(state, "sums", None)
    needs = trained or (grad and _trained(decay, before, *_of_window(call)))
    of_q, of_k, of_v, mask = q.shape, k.shape, v.shape, _checked(call.mask)
    others = tuple([x if x is None else _checked(x) for x in _others(call)])
    is_open = False
    if numbers == "traced" and torch.compiler.is_exporting():
        is_open = any(isinstance(shape[2], torch.SymInt) for shape in (of_q, of_k))
        of_q, of_k, of_v = map(_of_example, (of_q, of_k, of_v))
    if of_q[2:3] == _SINGLE and _decodes(call, numbers):
        keys = of_k[2]
        of_k, of_v = _rounded(of_k), _rounded(of_v)
        if mask is not None:
            mask = _of_keys(mask, keys)
        # Only these decays have the keys last: others may have as many heads or channels.
        if others[0] is not None and call.spec.decay == "token":
            others = (_of_keys(others[0], keys), *others[1:])
    return Signature(
        call.spec,
        form,
        call.causal,
        of_q,
        of_k,
        of_v,
        (dtype, device, k.dtype, k.device, v.dtype, v.device),
        mask,
        others,
        None if state is None else _checked_state(state),
        call.return_state,
        call.padding,
        part,
        trained,
        needs or forward_ad._current_level >= 0,
        device.type not in _AUTOCAST or torch.is_autocast_enabled(device.type),
        threads,
        numbers,
        is_open,
    )


def _trained(*tensors: object) -> bool:
    """Whether any of them needs a gradient."""
    return any(getattr(x, "requires_grad", False) for x in tensors)


def _of_window(call: Call) -> tuple[Any, ...]:
    """The tensors of a call that only an attention with a window and a series has."""
    if call.spec.outside != "series":
        return ()
    kept = getattr(call.state, "recent", None), getattr(call.state, "first", None)
    keys = (x for each in kept if isinstance(each, KeptKeys) for x in each)
    return (call.outside_scale, call.outside_q, call.outside_k, *keys)


_SINGLE = (1,)
_AUTOCAST = ("cpu", "cuda")  # not every other device can say whether it is on


def _others(call: Call) -> tuple[Any, ...]:
    """The tensors beside queries, keys, values and mask; decays first."""
    return (
        call.log_decay,
        call.coefficients,
        call.input_gate,
        call.output_gate,
        call.length_power,
        call.sink,
        call.outside_scale,
        call.outside_q,
        call.outside_k,
        call.norm_weight,
        call.norm_bias,
        call.backward_log_decay,
    )


def _decodes(call: Call, numbers: Numbers) -> bool:
    """Whether a single query has its keys, their number can be read, and there is no state."""
    k, v = call.k.shape, call.v.shape
    if numbers != "yes" or call.return_state or call.state is not None:
        return False
    return len(k) == len(v) == 4 and k[2] == v[2] > 1


def _rounded(shape: torch.Size) -> torch.Size:
    """The shape of keys or values with their number rounded down to a power of two."""
    return torch.Size((shape[0], shape[1], 1 << (shape[2].bit_length() - 1), shape[3]))


def _of_example(shape: torch.Size) -> torch.Size:
    """The shape with sizes of the example in place of those that ``torch.export`` leaves open."""
    sizes: list[Any] = list(shape)
    return torch.Size([x.node.hint if isinstance(x, torch.SymInt) else x for x in sizes])


def _of_keys(x: tuple[Any, ...], keys: int) -> tuple[Any, ...]:
    """What is checked of a mask or decay, whose last dimension may be that of the keys."""
    given = x[0]
    if isinstance(given, torch.Size) and given[-1:] == (keys,):
        return (*given[:-1], "keys"), *x[1:]
    return x


def _checked(x: object) -> tuple[Any, ...] | None:
    """What is checked of a tensor; of something else its type."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device
    return None if x is None else (type(x),)


def _checked_state(state: Any) -> tuple[Any, ...]:
    if not isinstance(state, State):
        return (type(state),)
    tensors = state.sums, state.visible, state.magnitudes, state.largest
    spec = state.spec if isinstance(state.spec, AttentionSpec) else type(state.spec)
    return spec, *map(_checked, tensors), _checked_keys(state.recent), _checked_keys(state.first)


def _checked_keys(kept: object) -> tuple[Any, ...] | None:
    if isinstance(kept, KeptKeys):
        return tuple(map(_checked, kept))
    return None if kept is None else (type(kept),)
