"""The table of forms, and the choice among them."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from softmax_rnn._utils.errors import unknown
from softmax_rnn.ops.cost import blocked_cost, chunked_cost
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms import channels, fused, triton
from softmax_rnn.ops.forms.blocked import blocked
from softmax_rnn.ops.forms.chunked import chunked
from softmax_rnn.ops.forms.dense import dense
from softmax_rnn.ops.forms.recurrent import recurrent
from softmax_rnn.ops.forms.row_sums import RowSums
from softmax_rnn.ops.series import MAX_RADIUS, order_for
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import fits, require_memory
from softmax_rnn.ops.variants import resolve

# What the error for an infinite series aims at.
_TOLERANCE = 1e-3


class Compute(Protocol):
    """The signature every form shares; see :func:`softmax_rnn.ops.forms.dense.dense`.

    Queries and keys come feature-mapped, but raw to a form that maps them itself.
    Those with a state take ``state`` and ``keep_state`` besides; see
    :func:`softmax_rnn.ops.forms.chunked.chunked`.
    """

    def __call__(  # noqa: D102
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        *,
        causal: bool,
        mask: Tensor | None,
    ) -> RowSums: ...


class Form(NamedTuple):
    """A way of computing: the function, and what it can do on a type of device.

    ``refuses`` names what is beyond it in queries, values and mask on a device that it supports, or
    nothing. A form with a state takes masks of keys alone, the same for every query and head.
    ``maps``: whether it takes raw queries and keys, and maps them itself.
    """

    compute: Compute
    supports: Callable[[AttentionSpec, str], bool]
    stateful: bool = False
    refuses: Callable[[AttentionSpec, Tensor, Tensor, Tensor | None], str] = lambda *_: ""
    maps: bool = False


# In the order of preference of form="auto", but for chunked, which the cost decides.
FORMS: dict[str, Form] = {
    "fused": Form(fused.fused, fused.supports, refuses=fused.refuses),
    "triton": Form(triton.triton, triton.supports, refuses=triton.refuses, maps=True),
    "blocked": Form(blocked, lambda spec, device: True),
    "chunked": Form(chunked, channels.supports, stateful=True),
    "recurrent": Form(recurrent, channels.supports, stateful=True),
    "dense": Form(dense, lambda spec, device: True),
}


def forms(spec: AttentionSpec | str, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """The names of the forms that can compute ``spec`` on ``device``."""
    spec, kind = resolve(spec), torch.device(device).type
    return tuple(name for name, form in FORMS.items() if form.supports(spec, kind))


def choose(
    form: str,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    stateful: bool,
) -> Form:
    """The form to compute with: the one that was asked for, or the cheapest for ``auto``.

    Args:
        form: ``auto`` or a form's name.
        spec: what to compute.
        q: queries, before the feature map.
        k: keys, before the feature map.
        v: values.
        causal: as in ``attention``.
        mask: as in ``attention``, four-dimensional.
        stateful: whether a state goes in or comes out.

    Raises:
        ValueError: if that form cannot, naming those that can.
        MemoryError: if the state does not fit.
    """
    if form != "auto" and form not in FORMS:
        raise unknown("form", form, ["auto", *FORMS])
    wants_state = stateful or (form != "auto" and FORMS[form].stateful)
    if wants_state:
        _check_finite_series(spec, q, k)
    able = [name for name in forms(spec, q.device) if FORMS[name].stateful or not stateful]
    keys_alone = mask is None or mask.shape[1] == mask.shape[2] == 1
    if wants_state and not keys_alone:
        assert mask is not None
        raise ValueError(
            "With a state every query and head sees the same keys: mask must be broadcastable to "
            f"[B, 1, 1, S], not {list(mask.shape)}. form='blocked' (in a model: a key/value cache) "
            "takes any mask, without a state."
        )
    refused = {name: FORMS[name].refuses(spec, q, v, mask) for name in able}
    able = [name for name in able if not refused[name]]
    if form == "auto":
        if q.device.type == "cpu" and "triton" in able:
            able.remove("triton")  # its interpreter is for tests
        form = _cheapest(able, spec, q, k, v, causal, keys_alone)
        if refused.get("fused"):
            _warn_once(f"form='fused' cannot compute {refused['fused']}: {form!r} does instead.")
    elif form not in able:
        what = refused.get(form) or "this spec"
        with_state = " with a state" if stateful else ""
        raise ValueError(
            f"form={form!r} cannot compute {what}{with_state} on {q.device.type}; "
            f"those that can: {', '.join(able)}. The spec: {spec}."
        )
    if not stateful and not (q.shape[0] and q.shape[2] and k.shape[2]):
        form = "dense"  # nothing to compute; fused kernels divide by these sizes
    if FORMS[form].stateful:
        require_memory(spec, q, k, v)
    return FORMS[form]


def _cheapest(
    able: list[str],
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    keys_alone: bool,
) -> str:
    if able[0] == "chunked":  # a state is asked for
        return "recurrent" if k.shape[2] == 1 else "chunked"
    if able[0] in ("triton", "blocked") and "chunked" in able and keys_alone:
        sizes = (spec, q.shape[2], k.shape[2], k.shape[3], v.shape[3])
        heads = max(1, k.shape[0] * k.shape[1])
        cost = chunked_cost(*sizes, causal=causal, heads=heads)
        if cost < blocked_cost(*sizes, causal=causal, heads=heads) and fits(spec, q, k, v):
            return "chunked"
    return able[0]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _check_finite_series(spec: AttentionSpec, q: Tensor, k: Tensor) -> None:
    if spec.clamp is not None:
        raise ValueError(
            f"A clamped score (clamp={spec.clamp}) is not a sum of powers of q . k and has no "
            "recurrent form; use clamp=None."
        )
    if spec.order is not None:
        return
    message = "The series 'exp' has infinitely many powers and so no finite state"
    features = [FEATURE_MAPS[spec.feature_map](x.detach().double()) for x in (q, k) if x.numel()]
    longest = [x.norm(dim=-1).amax().item() for x in features]
    radius = abs(spec.score_scale(q.shape[-1])) * math.prod(longest)
    if radius <= MAX_RADIUS:
        message += (
            f". Its Taylor series does: for these inputs |score| <= {radius:.3g}, where "
            f"series='taylor' with order={order_for(_TOLERANCE, radius)} is within {_TOLERANCE} of "
            "exp (remainder_bound)"
        )
    raise ValueError(f"{message}. Without a state: form='fused' or 'blocked'.")
