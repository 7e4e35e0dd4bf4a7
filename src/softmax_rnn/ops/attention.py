"""One call for every attention: check, plan, run, finish."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, library

from softmax_rnn.ops.decay import per_key_decay
from softmax_rnn.ops.directions import both_directions
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.finish import outputs
from softmax_rnn.ops.finite import all_finite, check_output, check_sums, scaled_for_powers
from softmax_rnn.ops.forms.row_sums import RowSums, no_autocast, without_hidden
from softmax_rnn.ops.forms.token import Weights, after_state, softmax
from softmax_rnn.ops.inputs import Call, check, check_not_growing
from softmax_rnn.ops.padding import Packed
from softmax_rnn.ops.plan import Plan, planned
from softmax_rnn.ops.segments import calls_of, check_segments, segments_of
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import KeptKeys, State, next_state
from softmax_rnn.ops.variants import resolve
from softmax_rnn.ops.window import window_and_series


class _Options(TypedDict, total=False):
    """The optional arguments of ``attention`` that do not change the type of its result."""

    causal: bool
    mask: Tensor | None
    padding: bool
    input_gate: Tensor | None
    output_gate: Tensor | None
    length_power: Tensor | None
    log_decay: Tensor | None
    backward_log_decay: Tensor | None
    coefficients: Tensor | None
    sink: Tensor | None
    outside_scale: Tensor | None
    outside_q: Tensor | None
    outside_k: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    form: str
    segments: Tensor | None
    state: State | None


Spec = AttentionSpec | str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *,
    return_state: Literal[False] = ..., **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *,
    return_state: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, State]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    padding: bool = False,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    length_power: Tensor | None = None,
    log_decay: Tensor | None = None,
    backward_log_decay: Tensor | None = None,
    coefficients: Tensor | None = None,
    sink: Tensor | None = None,
    outside_scale: Tensor | None = None,
    outside_q: Tensor | None = None,
    outside_k: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    form: str = "auto",
    segments: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """The attention of ``spec``: ``o_t = norm(g_out[t] * N_t / D_t)``, ``N_t = sum w_ts g_in v``.

    Equations 1 to 6 of the paper, and the systems of ``docs/related-systems.md``;
    :func:`softmax_rnn.ops.formula.attention` is the same in loops.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, Hkv, S, D]; Hkv divides H (grouped queries).
        v: values [B, Hkv, S, E].
        spec: an :class:`AttentionSpec` or a variant's name (``"norm"``, ``"taylor:4"``). A name
            whose layer maps queries and keys, or adds other parts, is refused; its spec
            (``variant("hedgehog")``) is for queries and keys that are mapped already.
        causal: query ``t`` sees keys up to ``t + S - T`` (the queries are the last T positions).
            Otherwise it sees all keys, and a window reaches as far to both sides, ``|t - s| <
            window``; the first keys (``global_keys``) belong to the windows after them. Decays and
            windows of both sides need as many queries as keys, and have no state.
        mask: boolean, True = visible, broadcastable to [B, H, T, S]; with ``causal`` both apply.
            What hidden keys, values and input gates hold never matters. If a row sees no key, its
            numerator is zero, and so is its output (apart from a ``norm_bias``).
        padding: whether the tokens that ``mask``, then [B, 1, 1, S], hides are padding: they count
            in no window, and what they output means nothing. Otherwise a window has as many slots,
            visible or not.
        input_gate: in [0, 1], [B, Hkv, S]; multiplies the values (appendix E).
        output_gate: multiplies the output: [B, H, T] (in [0, 1] in appendix E), or per channel
            [B, H, T, E].
        length_power: [H], the exponent of the ``learned_length`` denominator.
        log_decay: <= 0: [Hkv] for the decay ``head``, [B, Hkv, S] for ``token``, [B, Hkv, S, D] for
            ``channel``. The state before key ``s`` is multiplied by ``exp(log_decay[s])``; hidden
            keys decay nothing. Values below -1e4 count as -1e4, whose exponential is 0. Without
            ``causal``, weights decay by the distance in both directions, ``exp(-|G_t - G_s|)``.
        backward_log_decay: without ``causal``, what ``log_decay`` is to the reversed sequence, in
            its shapes: a later key ``s`` fades by the sum of these at ``t, ..., s - 1``. By default
            it fades by the same distance as an earlier key.
        coefficients: [H, N + 1], of a ``polynomial`` without coefficients of its own.
        sink: [H], for the denominator ``sum_plus_sink``.
        outside_scale: [H], >= 0, the factor of the weights outside the window
            (``outside="series"``); ones if not given. Infinity ignores the keys inside the window
            wherever a key is outside.
        outside_q: [B, H, T, F], the queries of the series outside the window
            (``outside="series"``), before the spec's feature map; ``q`` if not given.
        outside_k: [B, Hkv, S, F], its keys; ``k`` if not given. The score scale ``"1/sqrt(d)"``
            is that of their own width.
        norm_weight: [E], scale of the ``rms`` and ``layer`` norms; ones if not given.
        norm_bias: [E], shift of the ``layer`` norm; zeros if not given.
        form: ``auto``, or one of :func:`forms` (all agree up to rounding errors).
        segments: integers [B or 1, S], for several sequences in a row: a token sees those tokens
            alone that have its number, and no other number between. The output is that of the
            sequences one by one. Without a state.
        state: the sums of a finite series over earlier keys (section 3.1). Every query sees these
            keys as well. Gradients flow through the state. With a state, ``mask`` is per key,
            [B, 1, 1, S].
        return_state: whether to return the state after these keys as well.

    Returns:
        The output, [B, H, T, E], in the dtype of ``q``; with ``return_state`` a pair of the output
        and a :class:`State`. For float16 and bfloat16, sums and states accumulate in float32.

    Raises:
        ValueError: for invalid shapes, dtypes, devices, gates, form or state, and for a name of
            more than the operation; the message says what is allowed.
        OverflowError: if sums of a finite series, a state or outputs exceed the range of their
            dtype, in any form; not inside ``torch.vmap`` and ``torch.compile``, where numbers
            cannot be read. Outputs that the values bound, or a norm, are checked in float16 alone,
            if a gate or the norm's weights may enlarge them; sums of exp are not checked.
        MemoryError: if the state is too large; the message gives its size in bytes and the largest
            order that fits.
        FloatingPointError: for NaN or infinity in a state or in the tokens added to it; the message
            gives the index of the token. If powers of the keys that a query sees underflow, beside
            those of much longer keys that are hidden from it or have faded.
        NotImplementedError: for a second or forward-mode derivative; only ``form="dense"`` supports
            them. For a state, or most forms other than ``auto`` or ``dense``, inside a transform
            of ``torch.func``, such as ``torch.vmap``.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 128, 32).unbind(0)
        >>> attention(q, k, v, "norm").shape
        torch.Size([1, 4, 128, 32])
        >>> first, state = attention(q, k, v, "taylor:2", return_state=True)
        >>> next, state = attention(q, k, v, "taylor:2", state=state, return_state=True)
        >>> state.tokens
        256
    """
    call = Call(
        q,
        k,
        v,
        spec if isinstance(spec, AttentionSpec) else resolve(spec),
        bool(causal),
        mask,
        log_decay,
        coefficients,
        state,
        bool(return_state),
        bool(padding),
        input_gate,
        output_gate,
        length_power,
        sink,
        outside_scale,
        outside_q,
        outside_k,
        norm_weight,
        norm_bias,
        backward_log_decay,
    )
    form = form if isinstance(form, str) else repr(form)
    if segments is None:
        return _computed(call, form)
    check(call)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"With segments, queries and keys must be of the same tokens, not {q.shape[2]} "
            f"queries and {k.shape[2]} keys."
        )
    check_segments(segments, k.transpose(1, 2), call.stateful)
    divided = segments_of(segments, len(q))
    if len(divided.batches) == 0:  # no token
        return _computed(call, form)
    parts: list[Any] = [_computed(part, form) for part in calls_of(call, divided)]
    return divided.join(parts, 2)


def _computed(call: Call, form: str) -> Tensor | tuple[Tensor, State]:
    """The result of a call, in the shortest way that its plan allows."""
    plan = planned(call, form)
    if call.log_decay is not None:
        check_not_growing(call.log_decay)
    if call.backward_log_decay is not None:
        check_not_growing(call.backward_log_decay, "backward_log_decay")
    if plan.path in _SHORT:
        found = _SHORT[plan.path](call)
        if found is not None:  # else the general way tells what is wrong with its numbers
            return found
    return _in_steps(call, plan)


def _in_steps(call: Call, plan: Plan) -> Tensor | tuple[Tensor, State]:
    """The sums by the plan, and what turns them into outputs."""
    spec, packed = call.spec, None
    if call.mask is not None:
        call.mask = call.mask[(None,) * (4 - call.mask.ndim)]
        if call.padding and spec.window is not None:
            packed = Packed(call.mask, call.q, call.k)
            call.mask = packed.mask
            queries = packed.of_queries(call.q, call.outside_q, call.output_gate)
            call.q, call.outside_q, call.output_gate = queries
            names = "k", "v", "input_gate", "outside_k", "log_decay", "backward_log_decay"
            keys = packed.of_keys(*(getattr(call, name) for name in names))
            for name, x in zip(names, keys, strict=True):
                setattr(call, name, x)
    inputs = call.q, call.k, call.v
    with no_autocast(call.q.device.type):
        if call.input_gate is not None:
            if call.mask is not None:
                call.v, call.input_gate = without_hidden(call.mask, call.v, call.input_gate)
            call.v = call.v * call.input_gate.unsqueeze(-1).to(call.v.dtype)
        if call.log_decay is not None:
            call.log_decay = per_key_decay(call.log_decay, call.k, call.mask)
        if call.backward_log_decay is not None:
            call.backward_log_decay = per_key_decay(call.backward_log_decay, call.k, call.mask)
        kept: tuple[KeptKeys | None, KeptKeys | None] = (None, None)
        if spec.outside == "series":
            compute = functools.partial(_sums_of_part, plan.name)
            sums, kept = window_and_series(compute, call, packed is not None)
        elif plan.path == "parts":
            sums = _sums_of_part(plan.name, call)
        else:
            sums = _sums(call, plan)
        out, largest = outputs(sums, call)
        enlarged = (call.output_gate, call.norm_weight, call.norm_bias) != (None, None, None)
        if not spec.bounded or (enlarged and inputs[0].dtype == torch.float16):
            check_output(out, inputs[0].dtype, inputs, call.mask)
        out = out.to(inputs[0].dtype)
        if packed is not None:
            out = packed.restored(out)
        if not call.return_state:
            return out
        assert sums.state is not None
        added = sums.state, sums.magnitudes, largest
        return out, next_state(spec, call.state, *added, *kept, call.mask, call.k.shape[2])


# What a token changes of a state; each spec has the first ones of them.
_OF_TOKEN = ("sums", "visible", "magnitudes", "largest")


@library.custom_op(
    "softmax_rnn::token",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] state, Tensor? log_decay, "
    "Tensor tokens, str series, int order, float[]? coefficients, str decay, str feature_map, "
    "float scale) -> Tensor[]",
)
def _token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: list[Tensor],
    log_decay: Tensor | None,
    tokens: Tensor,
    *weights: Any,
) -> list[Tensor]:
    """The attention of one token after a state, and the state's new tensors; for compiled graphs.

    ``state`` are the state's tensors, in their order.
    """
    spec = Weights(*weights).spec
    before = State.from_tensors(spec, tokens, dict(zip(_OF_TOKEN, state, strict=False)))
    call = Call(q, k, v, spec, log_decay=log_decay, state=before, return_state=True)
    plan = planned(call)
    found: Any = after_state(call) if plan.path == "token" else None
    out, after = found or _in_steps(call, plan)
    # As the operator without data says.
    return [x.contiguous() for x in (out, *after.tensors.values())]


@_token.register_fake
def _empty_token(q: Tensor, k: Tensor, v: Tensor, state: list[Tensor], *_: Any) -> list[Tensor]:
    return [q.new_empty(*q.shape[:3], v.shape[3]), *(x.new_empty(x.shape) for x in state)]


def _token_in_graph(call: Call) -> tuple[Tensor, State]:
    """A token after a state in a compiled graph: compiled operations are slower than one call."""
    assert call.state is not None
    tokens = call.state.tokens
    tensors = {name: x for name, x in call.state.tensors.items() if name in _OF_TOKEN}
    count = tokens if isinstance(tokens, Tensor) else torch.full((), tokens)
    weights = Weights.of(call.spec, call.q.shape[3])
    given = call.q, call.k, call.v, [*tensors.values()], call.log_decay, count
    out, *new = _token(*given, *weights)
    found = dict(zip(tensors, new, strict=True))
    return out, State.from_tensors(call.spec, tokens + 1, found)


_SHORT: dict[str, Callable[[Call], Any]] = {
    "kernel": softmax,
    "token": after_state,
    "operator": _token_in_graph,
}


def _sums(call: Call, plan: Plan) -> RowSums:
    """The sums of a call, by its plan."""
    spec, k, v, mask = call.spec, call.k, call.v, call.mask
    # Beside a single query the copy of all keys takes most of the time: only if it is needed.
    later = mask is not None and plan.copies_later
    if mask is not None and not later:
        k, v = without_hidden(mask, k, v)
    q, inputs = call.q, (call.q, k, v)
    log_scale = None
    if spec.scale_free:
        given = spec, call.causal, mask, call.log_decay, call.stateful
        q, log_scale = scaled_for_powers(q, k, *given)
        if plan.form.maps:  # kernels take one type; of float16 these queries are float32
            k, v = k.to(q.dtype), v.to(q.dtype)
    if not plan.form.maps and spec.feature_map != "identity":
        q, k = (FEATURE_MAPS[spec.feature_map](x) for x in (q, k))
    options: dict[str, Any] = {"causal": call.causal, "mask": mask, **plan.options}
    if call.log_decay is not None:
        options["log_decay"] = call.log_decay
    if call.coefficients is not None:
        options["coefficients"] = call.coefficients
    if plan.form.stateful:
        options["keep_state"] = call.return_state
        if call.state is not None:
            options |= {"state": call.state.sums, "magnitudes": call.state.magnitudes}
            options["tokens"] = call.state.tokens
    sums = plan.form.compute(q, k, v, spec, **options)
    if later and mask is not None and not all_finite(sums.numerator):
        sums = plan.form.compute(q, *without_hidden(mask, k, v), spec, **options)
    if spec.order is not None:
        check_sums(sums, spec, call.state, inputs, k, call.log_decay)
    return sums if log_scale is None else sums._replace(log_scale=log_scale)


def _sums_of_part(form: str, part: Call) -> RowSums:
    """The sums of a window, of a series, or of one direction."""
    if part.both_directions:
        return both_directions(functools.partial(_sums_of_part, form), part)
    return _sums(part, planned(part, form, part=True))
