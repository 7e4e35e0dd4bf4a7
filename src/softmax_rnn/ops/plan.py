"""Which code computes a call is decided here (docs/design.md names two exceptions).

A call has a :class:`Signature`: its spec and sizes, its types and device, what is given, whether a
derivative is needed; but none of its numbers. :data:`FORMS` is the table of what there is: what
each form cannot compute, and which calls `auto` leaves to another one, in words. :func:`planned`
checks a call and chooses. The plan of a signature is kept, so that a call like an earlier one is
neither checked nor planned again.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from softmax_rnn._utils.errors import unknown
from softmax_rnn.ops.forms.chunks.chunked import chunked
from softmax_rnn.ops.forms.chunks.settings import Loops
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.cpu import pairs as native
from softmax_rnn.ops.forms.cpu import token as native_token
from softmax_rnn.ops.forms.first_order import transformed, unreadable, wrapped
from softmax_rnn.ops.forms.gpu import chunks as triton_chunks
from softmax_rnn.ops.forms.gpu import pairs as triton
from softmax_rnn.ops.forms.gpu import proof
from softmax_rnn.ops.forms.gpu.layout import MAX_ORDER
from softmax_rnn.ops.forms.pairs import fused
from softmax_rnn.ops.forms.pairs.blocked import blocked
from softmax_rnn.ops.forms.pairs.dense import dense
from softmax_rnn.ops.forms.row_sums import RowSums
from softmax_rnn.ops.inputs import Call, check, check_per_key
from softmax_rnn.ops.signature import Numbers, Signature, readable, signature, signature_of
from softmax_rnn.ops.spec import AttentionSpec, RowSum
from softmax_rnn.ops.state import (
    has_memory,
    is_small,
    require_memory,
    require_state,
)
from softmax_rnn.ops.variants import resolve
from softmax_rnn.ops.work import Sizes, chunk_length, chunks_pay

# Of so few pairs PyTorch's operations compute all weights at once (32 tokens with each other).
_FEW_PAIRS = 1024
# From so many queries on the C++ of pairs is faster than PyTorch's fused kernels.
_BESIDE_FUSED = 160
# The chunks in C++ pay from so many tokens of a chunk on, and from so many heads for each thread:
# with fewer, operations on all heads are as fast.
_SHORTEST_IN_CPP = 16
_LEAST_HEADS = 0.25


class Form(NamedTuple):
    """One way to compute an attention.

    Attributes:
        compute: the function, called as ``dense``, and with a state as ``chunked``.
        lacks: what of a spec it cannot compute on a type of device, in words; empty for nothing.
        refuses: what of a call with such a spec it cannot compute, likewise.
        leaves: which calls, of which this is one, ``auto`` leaves to a later form, likewise; empty
            if it takes it.
        stateful: whether it takes and returns states. Then its mask must be per key.
        maps: whether it applies the feature map to queries and keys itself.
    """

    compute: Callable[..., RowSums]
    lacks: Callable[[AttentionSpec, str], str] = lambda *_: ""
    refuses: Callable[[Signature], str] = lambda _: ""
    leaves: Callable[[Signature], str] = lambda _: ""
    stateful: bool = False
    maps: bool = False


def _few(s: Signature) -> str:
    """Why all pairs are computed at once, rather than in blocks."""
    if s.queries == 1:
        return "a single query: PyTorch's operations are as fast"
    few = s.queries * s.keys <= _FEW_PAIRS
    return "so few pairs: PyTorch's operations compute them at once" if few else ""


def _fused_lacks(spec: AttentionSpec, device: str) -> str:
    """What PyTorch's fused kernels cannot compute: they compute every pair, of exp alone."""
    if spec.series != "exp":
        return f"the series {spec.series!r}"
    for name in ("clamp", "window"):
        if getattr(spec, name) is not None:
            return f"a {name}"
    if spec.decay != "none":
        return "a decay"
    # Beside these, PyTorch has kernels for outputs in which the scale of a row cancels.
    kernels = spec.up_to_row_scale or device in ("cpu", "cuda")
    return "" if kernels else f"denominator={spec.denominator!r} with norm={spec.norm!r}"


def _fused_refuses(s: Signature) -> str:
    if s.device != "cuda" or s.spec.up_to_row_scale:  # SDPA chooses a kernel itself
        return ""
    width = max(s.width, s.v[3])
    if s.dtype not in (torch.bfloat16, torch.float16):
        return f"{s.dtype} inputs"
    if s.mask is not None:
        return "a mask"
    if width > fused.MAX_WIDTH:
        return f"heads of width {width}"
    if not fused.has_flash(s.types[1]):
        return "this spec without flash kernels (a GPU older than Ampere, or a build without them)"
    return ""


def _kernels_lack(spec: AttentionSpec, device: str) -> str:
    """What the C++ of pairs, once it is compiled, cannot compute."""
    if device != "cpu":
        return "anything"
    if spec.outside != "hidden":
        return f"outside={spec.outside!r}"
    if spec.decay == "channel":
        return "a decay per channel"
    if spec.learned_coefficients:
        return "learned coefficients"
    if spec.global_keys:
        return "global_keys"
    return ""


def _native_lacks(spec: AttentionSpec, device: str) -> str:
    missing = cpp.missing()
    return _kernels_lack(spec, device) or (missing and f"anything ({missing})")


def _mask_per_query(s: Signature) -> str:
    return "" if s.mask_of_keys else "a mask per query or head"


def _native_leaves(s: Signature) -> str:
    """The library is built for the first call that is not left, with a warning if that fails."""
    if s.stateful or _kernels_lack(s.spec, s.device) or _mask_per_query(s):
        return "what it cannot compute"
    # PyTorch maps elu + 1 in several passes.
    if (few := _few(s)) and (s.queries == 1 or s.spec.feature_map != "elu1"):
        return few
    wide = s.dtype in (torch.float32, torch.float64)
    if not _fused_lacks(s.spec, "cpu") and not (wide and s.queries >= _BESIDE_FUSED):
        return f"half types, and fewer than {_BESIDE_FUSED} queries: fused is faster"
    return cpp.missing(build=True)


def _triton_lacks(spec: AttentionSpec, device: str) -> str:
    """What the Triton kernels of pairs cannot compute."""
    if device not in ("cpu", "cuda"):
        return "anything"
    if device == "cpu" and not _interpreted():
        return "anything on a CPU (except in Triton's interpreter)"
    if not triton.INSTALLED:
        return "anything without Triton"
    if spec.decay == "channel":  # it is part of the scores' products
        return "a decay per channel"
    if spec.outside != "hidden":
        return f"outside={spec.outside!r}"
    return f"order {spec.order}" if (spec.order or 0) > triton.MAX_ORDER else ""


def _triton_refuses(s: Signature) -> str:
    width = max(s.width, s.v[3])
    if width > triton.MAX_WIDTH:
        return f"heads of width {width}"
    float64_cosine = s.dtype == torch.float64 and s.spec.feature_map == "cosine"
    if float64_cosine and width > triton.MAX_FLOAT64_COSINE:
        return f"float64 cosines of width {width}"
    if s.device == "cuda" and not _has_tensor_cores(s.types[1]):
        return f"this spec with Triton kernels on the {torch.cuda.get_device_name(s.types[1])}"
    return ""


def _triton_leaves(s: Signature) -> str:
    """A kernel is believed once it has proved itself."""
    if s.device == "cpu":
        return "anything on a CPU: there it is for tests"
    return reason(FORMS["triton"], s) or _unproven(s, "pairs")


def _unproven(s: Signature, kind: proof.Kind) -> str:
    of_sizes = s.width, s.v[3], s.types[1]
    scaled = s.dtype == torch.float16 and s.spec.scale_free  # in float32
    dtype = torch.float32 if scaled else s.dtype
    return "" if s.numbers == "no" else proof.failure(kind, s.spec, dtype, *of_sizes)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _has_tensor_cores(device: torch.device) -> bool:
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def _blocked_refuses(s: Signature) -> str:
    """Its loop over blocks is part of an exported program."""
    return "an exported program for several lengths" if s.open else ""


def _state_lacks(spec: AttentionSpec, device: str) -> str:
    if spec.series == "exp":
        return "the series 'exp'"
    if spec.clamp is not None:
        return "a clamp"
    return "" if spec.has_state else "a window that hides keys"


def _chunked_leaves(s: Signature) -> str:
    if s.stateful:
        return "a single token" if s.keys == 1 else ""
    pays = s.queries > 1 and s.spec.has_state and chunks_pay(_sizes(s), s.device)
    return "" if pays else "so few tokens: pairs take less time than states of this size"


def _recurrent_leaves(s: Signature) -> str:
    return "" if s.stateful and s.keys == 1 else "all but a single token with a state"


# In the order in which `auto` tries them: linear time where it pays, then kernels for all pairs.
# The plain recurrence reads a state with one query, then adds its key.
FORMS: dict[str, Form] = {
    "chunked": Form(chunked, _state_lacks, _mask_per_query, _chunked_leaves, stateful=True),
    "recurrent": Form(chunked, _state_lacks, _mask_per_query, _recurrent_leaves, stateful=True),
    "native": Form(native.native, _native_lacks, _mask_per_query, _native_leaves, maps=True),
    "fused": Form(fused.fused, _fused_lacks, _fused_refuses),
    "triton": Form(triton.triton, _triton_lacks, _triton_refuses, _triton_leaves, maps=True),
    "blocked": Form(blocked, refuses=_blocked_refuses, leaves=_few),
    "dense": Form(dense),
}

# What `attention` does first: `kernel` is softmax in one call of PyTorch, `token` a token after a
# state in one call of C++, `operator` the same in a compiled graph; `parts` a window and a series,
# or earlier and later keys.
Path = Literal["sums", "kernel", "token", "operator", "parts"]


class Plan(NamedTuple):
    """How a call is computed.

    Attributes:
        path: what ``attention`` does first.
        name: of the form that was chosen; with ``parts`` the one that was asked for, as each part
            has a plan of its own.
        form: that form.
        options: what only this form takes.
        copies_later: whether keys that a mask hides are replaced only if the sums are not finite:
            beside a single query, the copy of all keys takes most of the time.
        lasting: whether it holds for every call of the same signature. It does not where it depends
            on the free memory.
    """

    path: Path
    name: str
    form: Form
    options: dict[str, Any]
    copies_later: bool = False
    lasting: bool = True


@overload
def forms(
    spec: AttentionSpec | str,
    device: torch.device | str = ...,
    *,
    explain: Literal[False] = ...,
) -> tuple[str, ...]: ...


@overload
def forms(
    spec: AttentionSpec | str, device: torch.device | str = ..., *, explain: Literal[True]
) -> dict[str, str]: ...


def forms(
    spec: AttentionSpec | str, device: torch.device | str = "cpu", *, explain: bool = False
) -> tuple[str, ...] | dict[str, str]:
    """The names of the forms that can compute ``spec`` on ``device``.

    Args:
        spec: an :class:`AttentionSpec`, or the name of a variant.
        device: a device or its type.
        explain: whether to return every form, with what it cannot compute: nothing (``""``) if it
            can compute the spec.

    Example:
        >>> forms("softmax", explain=True)["chunked"]
        "the series 'exp'"
    """
    spec, kind = resolve(spec), torch.device(device).type
    if spec.outside == "series":  # every form that computes the series takes the window as well
        spec = replace(spec, window=None, global_keys=0, outside="hidden")
    found = {name: form.lacks(spec, kind) for name, form in FORMS.items()}
    return found if explain else tuple(name for name, lack in found.items() if not lack)


_SPECIAL = "what is empty, inside a transform of torch.func, or too large for the free memory"


def explain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | str = "softmax", **options: Any
) -> dict[str, str]:
    """Why a call of :func:`attention` takes the form that it takes; nothing is computed.

    Args:
        q: as in the call, like the others.
        k: likewise.
        v: likewise.
        spec: likewise.
        **options: all other arguments, as in the call.

    Returns:
        For each form, in the order in which ``form="auto"`` tries them: ``computes it``, or why it
        does not.

    Raises:
        ValueError, MemoryError, NotImplementedError: as :func:`attention`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 128, 32).unbind(0)
        >>> explain(q, k, v, "taylor:2")["fused"]
        "cannot compute the series 'taylor'"
    """
    form = options.pop("form", "auto")
    call = Call(q, k, v, resolve(spec), **options)
    plan = planned(call, form)
    if call.spec.outside == "series":
        return dict.fromkeys(FORMS, "the window and the series outside it are two calls")
    if call.both_directions:  # two calls alike
        call = replace(call, causal=True, backward_log_decay=None)
        plan = planned(call, form)
    s, words = signature(call, form), {}
    for name, row in FORMS.items():
        if why := reason(row, s):
            words[name] = f"cannot compute {why}"
        elif name == plan.name:
            words[name] = "computes it"
        elif form != "auto":
            words[name] = f"form={form!r} was asked for"
        elif plan.name in words:
            words[name] = f"comes after {plan.name}"
        else:
            words[name] = f"leaves {row.leaves(s) or _SPECIAL}"
    return words


_PLANS: dict[Signature, Plan] = {}
_MOST = 4096  # plans; then all are made again


def planned(call: Call, form: str = "auto", part: bool = False) -> Plan:
    """Check a call and choose how to compute it.

    ``part`` is whether the call is a part of another one, whose arguments are checked. A window
    takes another form if it has no such form as the series outside it.

    Raises:
        ValueError: for arguments that do not fit each other; for a form that is unknown or cannot
            compute them, with those that can.
        MemoryError: if the state does not fit the free memory.
        NotImplementedError: inside a transform of ``torch.func``, for a state or another form than
            ``dense``, unless all tensors are constants of the transform.
    """
    if part and form in FORMS and call.spec.window is not None:
        form = "auto" if FORMS[form].lacks(call.spec, call.q.device.type) else form
    if unreadable() or not readable(call):
        if not part:
            check(call)
        numbers: Numbers = "traced" if torch.compiler.is_compiling() else "no"
        return _plan(call, signature_of(call, form, part, cpp.threads(), numbers))
    key = signature_of(call, form, part, torch.get_num_threads(), "yes")
    found = _PLANS.get(key)
    if found is None:
        if not part:
            check(call)
        found = _plan(call, key)
        if found.lasting:
            if len(_PLANS) >= _MOST:
                _PLANS.clear()
            _PLANS[key] = found
    return found


def forget() -> None:
    """Make every plan again: needed where the library or the environment has changed."""
    _PLANS.clear()


def _plan(call: Call, s: Signature) -> Plan:
    if s.form != "auto" and s.form not in FORMS:
        raise unknown("form", s.form, ["auto", *FORMS])
    if s.spec.outside == "series":
        short = _path(s, s.form) == "token"
        return Plan("token" if short else "parts", s.form, FORMS["dense"], {})
    name = _chosen(call, s)
    if call.both_directions:
        return Plan("parts", s.form, FORMS["dense"], {})
    form, lasting = FORMS[name], True
    options: dict[str, Any] = {}
    if form.stateful:
        if not s.open:
            require_memory(s.spec, call.q, call.k, call.v)
        one = name == "recurrent" or s.queries == s.keys == 1
        chunk = 1 if one else chunk_length(_sizes(s))
        options = {"chunk": chunk, "engine": loops(s, chunk)}
    if s.spec.has_state and s.numbers == "yes":  # other plans are not kept
        lasting = is_small(s.spec, call.q, call.k, call.v)
    if s.device == "cuda" and s.numbers == "yes":  # no kernel proves itself meanwhile
        lasting = lasting and not torch.cuda.is_current_stream_capturing()
    # Sums of a finite series are checked, which needs keys without what is hidden.
    later = s.spec.order is None and s.queries == 1 and s.numbers == "yes" and not s.derivative
    return Plan(_path(s, name), name, form, options, later, lasting)


def _chosen(call: Call, s: Signature) -> str:
    """The name of the form: what was asked for, or the best one."""
    stateful = s.form != "auto" and FORMS[s.form].stateful
    if s.stateful or stateful:
        require_state(s.spec, call.q, call.k, call.v, asked=not s.stateful)
        check_per_key(call.mask)
    if transformed():
        if s.form == "auto" and not s.stateful:
            return "dense"  # which has every derivative
        differentiable = s.form == "dense" or (s.form == "fused" and s.spec.up_to_row_scale)
        if s.stateful or not differentiable:
            _require_constants(call, s)
    reasons = {name: reason(form, s) for name, form in FORMS.items()}
    if s.form == "auto":
        takes = (name for name, why in reasons.items() if not (FORMS[name].leaves(s) or why))
        found = next(takes)
        known = not (s.stateful or s.open)
        if found == "chunked" and known and not has_memory(s.spec, call.q, call.k, call.v):
            found = next(takes)
        if reasons["fused"] and not FORMS["fused"].lacks(s.spec, s.device) and not s.stateful:
            _warn_once(
                f"PyTorch's fused kernels cannot compute {reasons['fused']}: {found!r} is used."
            )
    elif reasons[s.form]:
        able = ", ".join(name for name, why in reasons.items() if not why)
        raise ValueError(
            f"form={s.form!r} cannot compute {reasons[s.form]} on {s.device}; "
            f"forms that can: {able}.{'' if s.part else f' The spec: {s.spec}.'}"
        )
    else:
        found = s.form
    empty = not (s.q[0] and s.queries and s.keys)
    return "dense" if empty and not s.stateful else found  # fused kernels divide by these sizes


def reason(form: Form, s: Signature) -> str:
    """What a form cannot compute of a call, in words; empty if it can compute it."""
    if s.stateful and not form.stateful:
        return form.lacks(s.spec, s.device) or "anything with a state"
    return form.lacks(s.spec, s.device) or form.refuses(s)


def _require_constants(call: Call, s: Signature) -> None:
    """Raise ``NotImplementedError`` unless a form with a state computes constants of a transform.

    The other forms have derivatives of their own, which no transform can take.
    """
    given = call.q, call.k, call.v, call.mask, call.log_decay, call.coefficients, call.input_gate
    sums = None if call.state is None else call.state.sums
    possible = s.stateful or FORMS[s.form].stateful
    if not possible or any(x is not None and wrapped(x) for x in (*given, sums)):
        what = "a state" if s.stateful else f"form={s.form!r}"
        raise NotImplementedError(
            f"{what} was given inside a transform of torch.func (vmap, grad, jvp, ...). Attention "
            "without a state works there, with form='auto' or 'dense'."
        )


def _sizes(s: Signature) -> Sizes:
    return Sizes(s.spec, s.queries, s.keys, s.width, s.v[3], s.causal, s.q[1] // s.k[1])


def loops(s: Signature, chunk: int) -> Loops:
    """Which loops compute the chunks of a call."""
    if s.causal and s.queries == s.keys == 1:
        return "torch"
    if s.device == "cuda":
        refused = triton_chunks_refuse(s, chunk) or _unproven(s, "chunks")
        return "torch" if refused else "triton"
    native = (
        s.device == "cpu"
        and s.spec.decay != "channel"
        and not s.spec.learned_coefficients
        and min(s.q[0], s.queries, s.width) > 0
        and chunk >= _SHORTEST_IN_CPP
        and max(s.queries, s.keys) >= cpp.LEAST_TOKENS
        and s.k[0] * s.k[1] >= _LEAST_HEADS * s.threads
        and not cpp.missing(build=True)
    )
    return "native" if native else "torch"


def triton_chunks_refuse(s: Signature, chunk: int) -> str:
    """What the chunks in Triton cannot compute of a call, in words; empty if they can.

    On a GPU; on a CPU in Triton's interpreter, for tests.
    """
    if not 1 <= (s.spec.order or 0) <= MAX_ORDER:
        return f"order {s.spec.order}"
    if s.spec.decay == "channel" or s.spec.learned_coefficients:
        return "a decay per channel, or learned coefficients"
    width, values = s.width, s.v[3]
    if max(width, values) > triton_chunks.MAX_WIDTH or (width | values) % triton_chunks.WIDTHS:
        return f"heads of width {width} and {values}"
    if not min(*s.q[:3], s.keys):
        return "nothing"
    if chunk % triton_chunks.TOKENS:
        return f"chunks of {chunk} tokens"
    if not triton.INSTALLED:
        return "anything without Triton"
    if s.device == "cpu":
        return "" if _interpreted() else "anything but in Triton's interpreter"
    return "" if s.dtype != torch.float64 and _has_tensor_cores(s.types[1]) else "these products"


def _path(s: Signature, form: str) -> Path:
    """What a call begins with: a single operation where one computes it, without derivatives.

    Of few tokens, calling several takes longer than the work.
    """
    if s.part or s.derivative or s.autocast or s.numbers == "no" or s.mask is not None:
        return "sums"
    one, all_sizes = s.queries == 1, (*s.q, *s.k, *s.v)
    if form == "fused" and s.spec.is_softmax and s.numbers == "yes" and not any(s.others):
        square = one or not s.causal or s.queries == s.keys
        return "kernel" if square and s.width == s.v[3] and all(all_sizes) else "sums"
    token = (
        s.form == "auto"
        and s.device == "cpu"
        and s.state is not None
        and s.return_state
        and one
        and s.keys == 1
        and all(all_sizes)
        and _computes_token(s.spec, s.dtype)
        and not cpp.missing(build=s.numbers == "yes")
    )
    if not token:
        return "sums"
    return "token" if s.numbers == "yes" else "operator"


def _computes_token(spec: AttentionSpec, dtype: torch.dtype) -> bool:
    """Whether ``cpu/token.py`` computes a spec: the quotient of a finite series."""
    plain = spec.norm == "none" and spec.output_gate == "none" and not spec.input_gate
    series = spec.has_state and not spec.learned_coefficients
    quotient = spec.row_sum == RowSum() and spec.decay != "channel"
    types = dtype in (torch.float32, torch.float64) and spec.feature_map in native_token.MAPS
    if spec.window is not None:  # its keys are mapped, and fade, as they are kept
        plain = plain and spec.feature_map == "identity" and spec.decay == "none"
    return plain and series and quotient and types


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=6)
