"""The chunked form, for a finite series: a state between chunks, scores within chunks.

It computes section 3.1 (``reference.exp_sum_by_chunks``), one chunk of tokens at a time, with
all powers stacked in one state. Time is linear in the length. The monomials of a chunk's keys times
its values are added to the state. The monomials of a chunk's queries are multiplied by the state of
all earlier keys; keys of the same chunk are weighted by their scores. The weight sum is an
additional value channel of ones. The backward pass processes the chunks in reverse order and
recomputes their monomials; it needs one stored state per chunk.

Both passes are PyTorch operators: a compiled model calls them without a graph break, for any number
of chunks. Their loops over chunks are ``loops.py``, ``cpu/chunks.py`` or ``gpu/chunks.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from softmax_rnn.ops.forms.chunks.columns import Columns, from_columns, to_columns, with_own_terms
from softmax_rnn.ops.forms.chunks.fading import decay_grad
from softmax_rnn.ops.forms.chunks.loops import by_heads
from softmax_rnn.ops.forms.chunks.magnitudes import growth, read_noise
from softmax_rnn.ops.forms.chunks.one_token import one_token
from softmax_rnn.ops.forms.chunks.settings import Loops, Settings, plain_spec
from softmax_rnn.ops.forms.cpu import chunks as native_chunks
from softmax_rnn.ops.forms.first_order import first_order
from softmax_rnn.ops.forms.gpu import chunks as triton_chunks
from softmax_rnn.ops.forms.row_sums import RowSums, no_data, without_autocast
from softmax_rnn.ops.monomials import state_rows
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.work import FEATURES


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None = None,
    coefficients: Tensor | None = None,
    state: Tensor | None = None,
    magnitudes: Tensor | None = None,
    tokens: int | Tensor = 0,
    keep_state: bool = False,
    chunk: int,
    engine: Loops,
) -> RowSums:
    """As :func:`dense`, with the earlier keys summed in ``state``.

    The mask is per key, broadcastable to [B, Hkv, 1, S]. The state holds sums over earlier keys:
    [B, Hkv, E + 1, rows], or E without a row sum; ``magnitudes`` are what was added to them,
    of ``tokens`` tokens.
    ``keep_state`` requests the state after the last key. ``chunk`` is the number of tokens per
    chunk; 1 is the plain recurrence. ``engine`` is what computes the chunks.
    """
    single = causal and q.shape[2] == k.shape[2] == 1
    weighting = state, keep_state, log_decay, coefficients
    scale, products = spec.score_scale(q.shape[3]), ""
    factor = scale
    if engine == "triton":  # which takes queries that are not rounded
        factor, products = 1.0, triton_chunks.product_type(q.dtype)
    given = to_columns(q, k, v, spec, mask, *weighting, factor, by_token=engine != "torch")
    inputs = first_order(*given)
    differentiable = torch.is_grad_enabled() and any(
        x.requires_grad for x in inputs if x is not None
    )
    # The number of states that are kept for it would limit the lengths of an exported program.
    differentiable = differentiable and not torch.compiler.is_exporting()
    assert spec.powers is not None
    weights = spec.series, spec.powers[1], spec.coefficients, spec.decay
    at_once = single and inputs[3] is not None and not (differentiable or no_data(q))
    if at_once:
        sums, last_state = one_token(Columns(*inputs), plain_spec(*weights))
    else:
        settings = Settings(
            *weights, causal, chunk, keep_state, differentiable, engine, scale, products
        )
        # The operator is used only where it is needed: its overhead is large for a single token.
        compute = _sums if differentiable or no_data(q) else _compute_sums
        sums, last_state, _ = compute(*inputs, *settings)
        if spec.decay == "channel":  # beside its products this costs little
            sums = with_own_terms(sums, settings.spec, Columns(*inputs))
    noise = after = None
    if spec.sums_can_cancel:
        before = None if magnitudes is None else magnitudes.flatten(0, 1)
        blocks = causal and not at_once, chunk
        noise, after = read_noise(given, before, weights, *blocks, scale / factor)
        noise = noise * growth(tokens, q.shape[2], k.shape[2], *blocks, noise)
    kept = {"state": last_state, "magnitudes": after} if keep_state else {}
    return from_columns(sums, spec, k, noise, **kept)


_INPUTS = "(Tensor q, Tensor k, Tensor v, Tensor? state, Tensor? log_decay, Tensor? learned, "
_SETTINGS = (
    "str series, int order, float[]? coefficients, str decay, bool causal, SymInt chunk, "
    "bool keep_state, bool differentiable, str loops, float scale, str products)"
)
_TAGS = (torch.Tag.cudagraph_unsafe,)  # the first call compiles steps and builds tables
_COUNT = len(Columns._fields)


@torch.no_grad()
def _compute_sums(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The sums, the state after the last key, and the states for the backward pass.

    The arguments are those of :class:`Columns` and :class:`Settings`. An operator cannot return
    ``None``, so unneeded outputs are empty tensors.
    """
    inputs, settings = Columns(*arguments[:_COUNT]), Settings(*arguments[_COUNT:])
    outputs = _empty_sums(*arguments)
    if settings.loops == "native":
        native_chunks.sums(inputs, settings.native(inputs), *outputs)
        return outputs
    if settings.loops == "triton":
        triton_chunks.sums(inputs, settings.triton(), *outputs)
        return outputs
    for heads, chunks in by_heads(settings, inputs):
        out, last_state = (x[heads] for x in outputs[:2])
        chunks.sums(out, last_state, list(outputs[2][:, heads]))
    return outputs


def _empty_sums(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, settings = Columns(*arguments[:_COUNT]), Settings(*arguments[_COUNT:])
    q, k, v, *_ = inputs
    (heads, channels), (groups, length) = v.shape[:2], q.shape[2:]
    shape = heads, channels, state_rows(settings.spec, q.shape[1])
    strides = (channels * groups * length, groups * length, length, 1)
    if settings.loops != "torch":  # a row per token
        strides = (channels * groups * length, 1, length * channels, channels)
    kept: tuple[int, ...] = (settings.kept_states(q, k), *shape)
    if settings.loops == "triton":
        kept = (
            triton_chunks.states_shape(inputs, settings.triton())
            if settings.differentiable
            else (0,)
        )
    return (
        q.new_empty_strided((heads, channels, groups, length), strides),
        q.new_empty(shape if settings.keep_state else 0),
        q.new_empty(kept),
    )


_sums = library.custom_op(
    "softmax_rnn::chunked_sums",
    _compute_sums,
    mutates_args=(),
    schema=f"{_INPUTS}{_SETTINGS} -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_sums.register_fake(_empty_sums)


@library.custom_op(
    "softmax_rnn::chunked_grads",
    mutates_args=(),
    schema=f"{_INPUTS}Tensor kept, Tensor? sums, Tensor? last_state, Tensor? dsums, "
    f"Tensor? dlast_state, {_SETTINGS} -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
@torch.no_grad()
def _grads(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of the inputs, empty for those that are ``None``.

    That of log decays needs ``sums`` and ``last_state``, and is not computed without them.
    """
    inputs, settings = Columns(*arguments[:_COUNT]), Settings(*arguments[_COUNT + 5 :])
    kept, sums, last_state, dsums, dlast_state = arguments[_COUNT : _COUNT + 5]
    created = _empty_grads(*arguments)
    outputs = Columns(*created)
    if dsums is None:
        dsums = inputs.values.new_zeros(*inputs.values.shape[:2], *inputs.queries.shape[2:])
    if settings.loops == "triton":
        ends, decays = (dsums, dlast_state), sums is not None
        triton_chunks.gradients(inputs, settings.triton(), kept, *ends, outputs, decays)
        return created
    if settings.loops == "native":
        native_chunks.gradients(inputs, settings.native(inputs), kept, dsums, dlast_state, outputs)
    for heads, chunks in by_heads(settings, inputs) if settings.loops == "torch" else ():
        found = None if dlast_state is None else dlast_state[heads]
        chunks.grads(dsums[heads], found, list(kept[:, heads]), outputs.of(heads))
    if sums is not None:
        assert outputs.log_decay is not None
        features = max(1, inputs.values.shape[1:].numel())
        count = max(1, FEATURES["cpu"] // features)  # that fit the cache
        for start in range(0, len(sums), count):
            heads = slice(start, start + count)
            last = None if dlast_state is None else (last_state[heads], dlast_state[heads])
            given = inputs.of(heads), outputs.of(heads), sums[heads], dsums[heads], last
            outputs.log_decay[heads] = decay_grad(settings.spec, *given)
    return created


@_grads.register_fake
def _empty_grads(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = arguments[:_COUNT]
    return tuple(inputs[0].new_empty(0) if x is None else torch.empty_like(x) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given, ctx.settings = inputs[:_COUNT], inputs[_COUNT:]
    sums, last_state, kept = output
    results = (None, None) if Columns(*given).log_decay is None else (sums, last_state)
    ctx.save_for_backward(*given, kept, *results)
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)


@without_autocast
def _backward(ctx: Any, dsums: Tensor | None, dlast: Tensor | None, *_: None) -> tuple[Any, ...]:
    settings = Settings(*ctx.settings)
    if not settings.differentiable:
        raise RuntimeError("An exported program has no derivatives: it keeps no states for them.")
    dlast = dlast if settings.keep_state else None
    saved = ctx.saved_tensors  # once: activation checkpointing allows only one access
    *saved, sums, last_state = saved
    if not ctx.needs_input_grad[Columns._fields.index("log_decay")]:
        sums = last_state = None
    grads = _grads(*saved, sums, last_state, dsums, dlast, *ctx.settings)
    given = zip(grads, ctx.needs_input_grad, strict=False)
    return *(grad if needed else None for grad, needed in given), *(None for _ in ctx.settings)


_sums.register_autograd(_backward, setup_context=_save)
