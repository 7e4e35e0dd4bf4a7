"""One call for every attention: feature map, form, denominator, gate, norm."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, library

from softmax_rnn.ops import decoding
from softmax_rnn.ops.decay import check_decay, per_key_decay
from softmax_rnn.ops.denominators import guarded, row_sum
from softmax_rnn.ops.dispatch import FORMS, choose, forms
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.finite import all_finite, check_output, check_sums, scaled_for_powers
from softmax_rnn.ops.forms.first_order import differentiated
from softmax_rnn.ops.forms.row_sums import (
    RowSums,
    compute_dtype,
    no_autocast,
    no_data,
    visible_count,
    without_hidden,
)
from softmax_rnn.ops.norms import normalized
from softmax_rnn.ops.padding import Packed
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import KeptKeys, State, check_state, largest_values, next_state
from softmax_rnn.ops.validation import (
    check_extras,
    check_outside,
    check_per_key,
    check_series,
    check_tensors,
    checked_mask,
)
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
    coefficients: Tensor | None
    sink: Tensor | None
    outside_scale: Tensor | None
    outside_q: Tensor | None
    outside_k: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    form: str
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
    coefficients: Tensor | None = None,
    sink: Tensor | None = None,
    outside_scale: Tensor | None = None,
    outside_q: Tensor | None = None,
    outside_k: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    form: str = "auto",
    state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """The attention of ``spec``: ``o_t = norm(g_out[t] * N_t / D_t)``, ``N_t = sum w_ts g_in v``.

    Equations 1 to 6 of the paper, and the systems of ``docs/related-systems.md``;
    :func:`softmax_rnn.ops.reference.attention` is the same in loops.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, Hkv, S, D]; Hkv divides H (grouped queries).
        v: values [B, Hkv, S, E].
        spec: an :class:`AttentionSpec` or a variant's name (``"norm"``, ``"taylor:4"``). A name
            whose layer maps queries and keys, or adds other parts, is refused; its spec
            (``variant("hedgehog")``) is for queries and keys that are mapped already.
        causal: query ``t`` sees keys up to ``t + S - T`` (the queries are the last T positions).
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
            keys decay nothing. Values below -1e4 count as -1e4, whose exponential is 0. Decays and
            windows need ``causal``.
        coefficients: [H, N + 1], of a ``polynomial`` without coefficients of its own.
        sink: [H], for the denominator ``sum_plus_sink``.
        outside_scale: [H], the factor of the weights outside the window (``outside="series"``);
            ones if not given. Infinity ignores the keys inside the window wherever a key is
            outside.
        outside_q: [B, H, T, F], the queries of the series outside the window
            (``outside="series"``), before the spec's feature map; ``q`` if not given.
        outside_k: [B, Hkv, S, F], its keys; ``k`` if not given. The score scale ``"1/sqrt(d)"``
            is that of their own width.
        norm_weight: [E], scale of the ``rms`` and ``layer`` norms; ones if not given.
        norm_bias: [E], shift of the ``layer`` norm; zeros if not given.
        form: ``auto``, or one of :func:`forms` (all agree up to rounding errors).
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
        OverflowError: if sums, a state or outputs exceed the range of their dtype, in any form;
            not inside ``torch.vmap`` and ``torch.compile``, where numbers cannot be read.
        MemoryError: if the state is too large; the message gives its size in bytes and the largest
            order that fits.
        FloatingPointError: for NaN or infinity in a state or in the tokens added to it; the message
            gives the index of the token. If powers of the keys that a query sees underflow, beside
            those of much longer keys that are hidden from it or have faded.
        NotImplementedError: for a second or forward-mode derivative; only ``form="dense"`` supports
            them. For a state, or a form other than ``auto`` or ``dense``, inside a transform of
            ``torch.func``, such as ``torch.vmap``.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 128, 32).unbind(0)
        >>> attention(q, k, v, "norm").shape
        torch.Size([1, 4, 128, 32])
        >>> first, state = attention(q, k, v, "taylor:2", return_state=True)
        >>> next, state = attention(q, k, v, "taylor:2", state=state, return_state=True)
        >>> state.tokens
        256
    """
    if not isinstance(spec, AttentionSpec):
        spec = resolve(spec)
    check_tensors(q, k, v, causal)
    mask = checked_mask(mask, q, k)
    queries, keys = q.shape[2], k.shape[2]
    none = input_gate is output_gate is length_power is coefficients is sink is None
    if spec.needs_tensors or not (none and outside_scale is norm_weight is norm_bias is None):
        extra = {
            "input_gate": input_gate,
            "output_gate": output_gate,
            "length_power": length_power,
            "coefficients": coefficients,
            "sink": sink,
            "outside_scale": outside_scale,
            "norm_weight": norm_weight,
            "norm_bias": norm_bias,
        }
        check_extras(extra, spec, q, v)
    if outside_q is not None or outside_k is not None:
        check_outside(outside_q, outside_k, q, k, spec)
    if spec.order is not None:
        check_series(spec, compute_dtype(q.dtype))
    check_decay(log_decay, spec, k, causal)
    if state is not None:
        check_state(state, spec, k, v, outside_k)
    if state is not None or return_state:
        check_per_key(mask)
    packed = None
    if padding and mask is not None and spec.window is not None:
        check_per_key(mask, "padding=True")
        packed = Packed(mask, q, k)
        mask = packed.mask
        q, outside_q, output_gate = packed.of_queries(q, outside_q, output_gate)
        k, v, input_gate = packed.of_keys(k, v, input_gate)
        outside_k, log_decay = packed.of_keys(outside_k, log_decay)
    if queries == 1 and form == "auto" and mask is None and q.device.type == "cpu":
        if state is None and not return_state:
            alone = decoding.over_keys(q, k, v, spec)
            if alone is not None:
                return alone
        elif state is not None and return_state and keys == 1 and output_gate is None:
            after = decoding.after_state(q, k, v, spec, state, log_decay)
            if after is not None:
                return after
            if decoding.in_compiled_graph(q, k, v, spec, state, log_decay):
                tokens, weights = state.tokens, decoding.Weights.of(spec, q.shape[3])
                tokens = tokens if isinstance(tokens, Tensor) else torch.full((), tokens)
                tensors = state.tensors
                out, *new = _token(q, k, v, [*tensors.values()], log_decay, tokens, *weights)
                found = dict(zip(tensors, new, strict=True))
                return out, State.from_tensors(spec, state.tokens + 1, found)

    input_dtype, dtype, inputs = q.dtype, compute_dtype(q.dtype), (q, k, v)
    with no_autocast(q.device.type):
        if input_gate is not None:
            if mask is not None:
                v, input_gate = without_hidden(mask, v, input_gate)
            v = v * input_gate.unsqueeze(-1).to(v.dtype)
        terms: dict[str, Any] = {
            "mask": mask,
            "log_decay": per_key_decay(log_decay, k, mask),
            "coefficients": coefficients,
            "state": state,
            "keep_state": return_state,
        }
        kept: tuple[KeptKeys | None, KeptKeys | None] = (None, None)
        if spec.outside == "series":
            compute = functools.partial(_sums_of_part, form)
            terms |= {
                "outside_scale": outside_scale,
                "outside_q": outside_q,
                "outside_k": outside_k,
                "packed": packed is not None,
            }
            sums, kept = window_and_series(compute, q, k, v, spec, **terms)
        else:
            sums = _sums(form, spec, q, k, v, causal=causal, **terms)
        out, log_scale, largest = sums.numerator.to(dtype), sums.log_scale, None
        if sums.magnitudes is not None or (spec.row_sum is not None and guarded(sums, spec)):
            largest = largest_values(v, mask, state)
        if spec.row_sum is not None:
            if sums.weight_sum is not None:  # else the form has already divided by it
                total, log_scale = row_sum(sums, spec, largest, sink)
                out = out / total.unsqueeze(-1)
        elif spec.denominator != "none":
            window = spec.hiding_window, spec.global_keys
            length = visible_count(queries, keys, causal, mask, q.device, *window)
            if state is not None:
                length = length + state.visible[:, None, None]
            length = length.clamp(min=1).to(dtype)
            if length_power is not None:
                length = length ** length_power.to(dtype).unsqueeze(-1)
            out = out / length.unsqueeze(-1)
        if output_gate is not None:
            output_gate = output_gate.to(dtype)
            output_gate = output_gate if output_gate.ndim == 4 else output_gate.unsqueeze(-1)
            if spec.output_gate == "before_norm":
                out = out * output_gate
        out = normalized(out, log_scale, spec.norm, norm_weight, norm_bias)
        if output_gate is not None and spec.output_gate == "after_norm":
            out = out * output_gate
        if not spec.bounded:
            check_output(out, input_dtype, inputs, mask)
        out = out.to(input_dtype)
        if packed is not None:
            out = packed.restored(out)
        if not return_state:
            return out
        assert sums.state is not None
        added = sums.state, sums.magnitudes, largest
        return out, next_state(spec, state, *added, *kept, mask, keys)


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
    spec = decoding.Weights(*weights).spec
    names = "sums", "visible", "magnitudes", "largest"
    before = State.from_tensors(spec, tokens, dict(zip(names, state, strict=False)))
    out, after = attention(q, k, v, spec, log_decay=log_decay, state=before, return_state=True)
    # As the operator without data says.
    return [x.contiguous() for x in (out, *after.tensors.values())]


@_token.register_fake
def _empty_token(q: Tensor, k: Tensor, v: Tensor, state: list[Tensor], *_: Any) -> list[Tensor]:
    return [q.new_empty(*q.shape[:3], v.shape[3]), *(x.new_empty(x.shape) for x in state)]


def _sums(
    form: str,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    mask: Tensor | None,
    state: State | None = None,
    keep_state: bool = False,
    **weighting: Tensor | None,
) -> RowSums:
    """The sums of a spec, by the chosen form, of queries and keys before the feature map.

    ``weighting`` are the form's ``log_decay`` and ``coefficients``.
    """
    stateful = state is not None or keep_state
    # Beside a single query the copy of all keys takes most of the time: only if it is needed.
    later = (
        mask is not None
        and spec.order is None
        and q.shape[2] == 1
        and not (no_data(q) or any(map(differentiated, (q, k, v))))
    )
    if mask is not None and not later:
        k, v = without_hidden(mask, k, v)
    inputs = q, k, v
    given: dict[str, Any] = {"causal": causal, "mask": mask}
    decay = weighting.get("log_decay")
    others = weighting.get("coefficients"), None if state is None else state.sums
    chosen = choose(form, spec, q, k, v, **given, log_decay=decay, others=others, stateful=stateful)
    log_scale = None
    if spec.scale_free and not (chosen.maps and q.dtype == torch.float16):
        q, log_scale = scaled_for_powers(q, k, spec, causal, mask, decay, stateful)
    if not chosen.maps:
        q, k = (FEATURE_MAPS[spec.feature_map](x) for x in (q, k))
    options: dict[str, Any] = {name: x for name, x in weighting.items() if x is not None}
    if chosen.stateful:
        options["keep_state"] = keep_state
        if state is not None:
            options |= {"state": state.sums, "magnitudes": state.magnitudes}
            options["tokens"] = state.tokens
    sums = chosen.compute(q, k, v, spec, **given, **options)
    if later and mask is not None and not all_finite(sums.numerator):
        sums = chosen.compute(q, *without_hidden(mask, k, v), spec, **given, **options)
    if spec.order is not None:
        check_sums(sums, spec, state, inputs, k, decay)
    return sums if log_scale is None else sums._replace(log_scale=log_scale)


def _sums_of_part(form: str, spec: AttentionSpec, q: Tensor, *args: Any, **options: Any) -> RowSums:
    """The sums of a window or of a series; a window takes another form if it has no such form."""
    if form in FORMS and spec.window is not None and form not in forms(spec, q.device):
        form = "auto"
    return _sums(form, spec, q, *args, **options)
