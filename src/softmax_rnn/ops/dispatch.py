"""The table of forms, and the choice among them."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn._utils.errors import unknown
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms import fused, native, triton
from softmax_rnn.ops.forms.blocked import blocked
from softmax_rnn.ops.forms.chunked import chunked
from softmax_rnn.ops.forms.dense import dense
from softmax_rnn.ops.forms.first_order import transformed, wrapped
from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype
from softmax_rnn.ops.monomials import cumulative_dimension, degrees
from softmax_rnn.ops.series import MAX_RADIUS, order_for
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import fits, require_memory
from softmax_rnn.ops.validation import check_per_key
from softmax_rnn.ops.variants import resolve
from softmax_rnn.ops.work import chunks_pay, sizes_of

# The tolerance of the Taylor series that the error for exp suggests.
_TOLERANCE = 1e-3
# Bytes of the largest state that it suggests.
_REASONABLE = 2**28


class Form(NamedTuple):
    """One way to compute an attention.

    Attributes:
        compute: the function, called as ``dense``, and with a state as ``chunked``.
        supports: whether it can compute a spec on a type of device.
        stateful: whether it takes and returns states. Then its mask must be per key, the same for
            every query and head.
        refuses: names the property of queries, values or mask that it cannot handle on a supported
            device; empty if it can handle all.
        maps: whether it applies the feature map to queries and keys itself.
    """

    compute: Callable[..., RowSums]
    supports: Callable[[AttentionSpec, str], bool] = lambda *_: True
    stateful: bool = False
    refuses: Callable[[AttentionSpec, Tensor, Tensor, Tensor | None], str] = lambda *_: ""
    maps: bool = False


def _has_state(spec: AttentionSpec, device: str) -> bool:
    return spec.has_state


# form="auto" prefers earlier forms, but chooses chunked where its cost is lower.
FORMS: dict[str, Form] = {
    "native": Form(native.native, native.supports, refuses=native.refuses, maps=True),
    "fused": Form(fused.fused, fused.supports, refuses=fused.refuses),
    "triton": Form(triton.triton, triton.supports, refuses=triton.refuses, maps=True),
    "blocked": Form(blocked),
    "chunked": Form(chunked, _has_state, stateful=True),
    # The plain recurrence, one token at a time: a query reads the state, then its key is added.
    "recurrent": Form(functools.partial(chunked, chunk=1), _has_state, stateful=True),
    "dense": Form(dense),
}

# What auto chooses from for one query on a CPU: the others have more operations.
_ONE_QUERY = ("fused", "blocked", "dense")
# Of so few pairs the weights are computed at once (32 tokens with each other).
_FEW_PAIRS = 1024
# The forms that compute every pair of a finite series; chunked may be faster.
_PAIRS = ("native", "triton", "blocked")


def forms(spec: AttentionSpec | str, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """The names of the forms that can compute ``spec`` on ``device``."""
    spec, kind = resolve(spec), torch.device(device).type
    if spec.outside == "series":  # every form that computes the series takes the window as well
        spec = replace(spec, window=None, global_keys=0, outside="hidden")
    return tuple(name for name, form in FORMS.items() if form.supports(spec, kind))


def _candidates(form: str, spec: AttentionSpec, q: Tensor, stateful: bool) -> list[str]:
    """The forms to choose from; of a decoded token only those that could be the fastest."""
    if form == "auto" and q.shape[2] == 1 and q.device.type == "cpu" and not stateful:
        return [name for name in _ONE_QUERY if FORMS[name].supports(spec, "cpu")]
    return [name for name in forms(spec, q.device) if FORMS[name].stateful or not stateful]


def choose(
    form: str,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None = None,
    others: tuple[Tensor | None, ...] = (),
    stateful: bool,
) -> Form:
    """Return the requested form, or the cheapest one for ``auto``.

    Queries and keys are passed before the feature map. ``stateful`` is whether a state is given or
    returned, ``others`` are further tensors. The other arguments are as in ``attention``.

    Raises:
        ValueError: if the form cannot compute these arguments; the message lists forms that can.
        MemoryError: if the state does not fit.
    """
    if form != "auto" and form not in FORMS:
        raise unknown("form", form, ["auto", *FORMS])
    wants_state = stateful or (form != "auto" and FORMS[form].stateful)
    if wants_state:
        _require_state(spec, q, k, v, asked=not stateful)
    candidates = _candidates(form, spec, q, stateful)
    if transformed():
        given = (q, k, v, mask, log_decay, *others)
        candidates = _for_transforms(form, candidates, stateful, given)
    per_key_mask = mask is None or mask.shape[1] == mask.shape[2] == 1
    if wants_state:
        check_per_key(mask)
    refused = {name: FORMS[name].refuses(spec, q, v, mask) for name in candidates}
    candidates = [name for name in candidates if not refused[name]]
    if form == "auto":
        if q.device.type == "cpu" and "triton" in candidates:
            candidates.remove("triton")  # its interpreter is for tests
        if not per_key_mask:
            candidates = [name for name in candidates if not FORMS[name].stateful]
        # The kernels of native map queries and keys themselves, where PyTorch makes several passes.
        few = q.shape[2] * k.shape[2] <= _FEW_PAIRS and spec.feature_map != "elu1"
        if stateful or few or not native.pays(spec, q, "fused" in candidates):
            candidates = [name for name in candidates if name != "native"]
        form = _cheapest(candidates, spec, q, k, v, causal)
        if refused.get("fused"):
            _warn_once(f"form='fused' cannot compute {refused['fused']}: {form!r} is used instead.")
    elif form not in candidates:
        what = refused.get(form) or "this spec"
        with_state = " with a state" if stateful else ""
        raise ValueError(
            f"form={form!r} cannot compute {what}{with_state} on {q.device.type}; "
            f"forms that can: {', '.join(candidates)}. The spec: {spec}."
        )
    if not stateful and not (q.shape[0] and q.shape[2] and k.shape[2]):
        form = "dense"  # nothing to compute; fused kernels divide by these sizes
    if FORMS[form].stateful:
        require_memory(spec, q, k, v)
    return FORMS[form]


def _for_transforms(
    form: str, candidates: list[str], stateful: bool, inputs: tuple[Tensor | None, ...]
) -> list[str]:
    """The forms to choose from inside a transform of torch.func: dense has every derivative.

    Raises:
        NotImplementedError: for a state, or a form with a gradient by hand, unless all inputs are
            constants of the transform.
    """
    if form == "auto" and not stateful:
        return ["dense"]
    known = form in ("dense", "fused") and not stateful
    if not known and any(x is not None and wrapped(x) for x in inputs):
        what = "a state" if stateful else f"form={form!r}"
        raise NotImplementedError(
            f"{what} was given inside a transform of torch.func (vmap, grad, jvp, ...). Attention "
            "without a state works there, with form='auto' or 'dense'."
        )
    return candidates


def _cheapest(
    candidates: list[str], spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> str:
    if candidates[0] == "chunked":  # with a state
        return "recurrent" if k.shape[2] == 1 else "chunked"
    if (
        candidates[0] in _PAIRS
        and "chunked" in candidates
        and chunks_pay(sizes_of(spec, q, k, v, causal))
        and fits(spec, q, k, v)
    ):
        return "chunked"
    few = q.shape[2] == 1 or q.shape[2] * k.shape[2] <= _FEW_PAIRS
    if candidates[0] == "blocked" and few:
        return "dense"  # no blocks, which take more operations
    return candidates[0]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _require_state(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, asked: bool) -> None:
    """Raise ``ValueError`` for a spec without a state; the message suggests a Taylor order.

    ``asked`` is whether only the form that was asked for needs a state.
    """
    if spec.order is not None or spec.clamp is not None or spec.hiding_window is not None:
        degrees(spec)
        return
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
