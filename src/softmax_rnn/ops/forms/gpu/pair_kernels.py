"""The kernels of the triton form: the sums, and the gradients of q and of k and v.

One program holds one tile and loops over other tiles. For the sums and the gradient of q, a tile of
queries loops over its visible keys. For the gradients of k and v, a tile of keys loops over the
queries that see them, and sums over the query heads of the group. Each output is written by one
program, so results do not depend on the order of programs. Tiles without a visible pair are
skipped: future keys, and those before a window. Without a window, tiles in which every query sees
every key need no check of positions.

Queries and keys are mapped by ``phi`` (MAP) when they are loaded. Gradients of features are mapped
back before they are stored, so features stay on the chip. A score ``s = SCALE * phi(q) . phi(k)``
has the weight ``w(min(s, CLAMP))``: the power series of COEFFICIENTS, unrolled by Horner's rule, or
exp if COEFFICIENTS is None. With ``learned`` numbers [H, N + 1], COEFFICIENTS are their factors. If
exp might overflow, the row ``maximum`` is subtracted from its exponent; other weights need no
maximum. A decay multiplies a weight by ``exp(G_t - G_s)``; of exp it is part of the exponent.

Scores, sums and ``phi`` are computed in float32 (float64 for float64 inputs). Features are rounded
to the dtype of the inputs. Factors of products with weights or gradients have this dtype too, but
float32 instead of float16: sums that are not normalised exceed the range of float16.

Pointers refer to queries [B, H, T, D], keys [B, Hkv, S, D], values and the numerator's gradient,
and a mask [B, H, T, S] of bytes. Each has four strides (0 where a mask is broadcast). The sums and
maxima are contiguous [B, H, T], the ``running`` sums ``G`` of log decays [B, Hkv, S, 2]: a sum and
what its rounding lost. The ``span`` [B, 2] goes from the first key that every query sees besides
the WINDOW to the end of the last one. BY_QUERY is whether the mask differs between queries. LONG is
whether the autotuner treats the sequence as long. EDGE selects the tiles that need a check of
positions or mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softmax_rnn.ops.forms.gpu.tiles import (
    at_head,
    fading_between,
    global_range,
    hide,
    key_range,
    load_features,
    load_rows,
    map_backward,
    own_tile,
    query_range,
    store_rows,
    visible_pairs,
)

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _product(a, b, SUM: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=SUM)


@triton.jit
def _add_product(total, a, b, PRECISION: tl.constexpr):
    return tl.dot(a.to(b.dtype), b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _plus_coefficient(x, n: tl.constexpr, learned, COEFFICIENTS: tl.constexpr):
    if COEFFICIENTS[n] != 0:
        if learned is None:
            x += COEFFICIENTS[n]
        else:
            x += COEFFICIENTS[n] * tl.load(learned + n)
    return x


@triton.jit
def _series(x, learned, COEFFICIENTS: tl.constexpr):
    ORDER: tl.constexpr = len(COEFFICIENTS) - 1
    result = _plus_coefficient(tl.full(x.shape, 0.0, x.dtype), ORDER, learned, COEFFICIENTS)
    for n in tl.static_range(ORDER):
        result = _plus_coefficient(result * x, ORDER - 1 - n, learned, COEFFICIENTS)
    return result


@triton.jit
def _clamped(scores, CLAMP: tl.constexpr):
    if CLAMP is not None:
        scores = tl.where(scores > CLAMP, CLAMP, scores)  # tl.minimum would drop a NaN
    return scores


@triton.jit
def _weights(x, fading, shift, learned, COEFFICIENTS: tl.constexpr):
    """The weights of clamped scores."""
    if COEFFICIENTS is None:
        if fading is not None:
            x = x + fading
        if shift is not None:
            x = x - shift
        weights = tl.exp(x)
    else:
        weights = _series(x, learned, COEFFICIENTS)
        if fading is not None:
            weights *= tl.exp(fading)
    return weights


@triton.jit
def _slopes(
    scores, weights, fading, learned, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """The derivatives of ``weights`` by the scores, before the clamp."""
    slopes = weights
    if COEFFICIENTS is not None:
        if learned is not None:
            learned += 1
        slopes = _weights(_clamped(scores, CLAMP), fading, None, learned, SLOPE)
    if CLAMP is not None:
        slopes = tl.where(scores > CLAMP, 0.0, slopes)
    return slopes


@triton.jit
def sums(
    q, k, v, mask, running, learned, span, numerator, weight_sum, maximum,
    q_strides, k_strides, v_strides, mask_strides, numerator_strides,
    H, GROUPS, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALE: tl.constexpr, CLAMP: tl.constexpr, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_QUERY: tl.constexpr,
    PRECISION: tl.constexpr, LONG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Numerator, weight sum and, where ``maximum`` is given, row maximum of a tile of queries."""
    SUM: tl.constexpr = weight_sum.dtype.element_ty
    FACTOR: tl.constexpr = tl.float32 if v.dtype.element_ty == tl.float16 else v.dtype.element_ty
    first, row, batch, head = own_tile(T, H, True, BLOCK_T)
    queries = first + tl.arange(0, BLOCK_T)
    q = at_head(q, q_strides, batch, head)
    k = at_head(k, k_strides, batch, head // GROUPS)
    v = at_head(v, v_strides, batch, head // GROUPS)
    if mask is not None:
        mask = at_head(mask, mask_strides, batch, head)
    if running is not None:
        running += row // GROUPS * S * 2
    if learned is not None:
        learned += head * len(COEFFICIENTS)
    global_start, global_end = global_range(span, batch)
    q_tile = load_features(q, queries, q_strides, T, SUM, MAP, D, BLOCK_D)

    out = tl.full((BLOCK_T, BLOCK_E), 0.0, SUM)
    total = tl.full((BLOCK_T,), 0.0, SUM)
    top = tl.full((BLOCK_T,), float("-inf"), SUM)
    for EDGE in tl.static_range(2):
        start, end = key_range(
            EDGE, first, mask, T, S, global_start, global_end, CAUSAL, WINDOW, BLOCK_T, BLOCK_S
        )
        for key in range(start, end, BLOCK_S):
            keys = key + tl.arange(0, BLOCK_S)
            down, across = queries[:, None], keys[None, :]
            k_tile = load_features(k, keys, k_strides, S, SUM, MAP, D, BLOCK_D)
            v_tile = load_rows(v, keys, v_strides, S, E, BLOCK_E).to(FACTOR)
            scores = _product(q_tile, tl.trans(k_tile), SUM, PRECISION) * SCALE
            fading = fading_between(running, down, across, T, S)
            visible = visible_pairs(
                EDGE, mask, mask_strides, down, across, T, S, global_end, CAUSAL, WINDOW, BY_QUERY
            )
            scores = _clamped(scores, CLAMP)
            if maximum is not None:
                if fading is not None:
                    scores += fading
                scores = hide(scores, visible, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.exp(scores - shift[:, None])
                correction = tl.exp(top - shift)
                total *= correction
                out *= correction[:, None]
                top = higher
            else:
                weights = _weights(scores, fading, None, learned, COEFFICIENTS)
                weights = hide(weights, visible)
            total += tl.sum(weights, 1)
            out = _add_product(out, weights, v_tile, PRECISION)
    numerator = at_head(numerator, numerator_strides, batch, head)
    store_rows(numerator, queries, numerator_strides, T, out, E, BLOCK_E)
    tl.store(weight_sum + row * T + queries, total, mask=queries < T)
    if maximum is not None:
        top = tl.where(top == float("-inf"), 0.0, top)
        tl.store(maximum + row * T + queries, top, mask=queries < T)


@triton.jit
def query_grads(
    q, k, v, mask, running, learned, span, maximum, grad, grad_sum, dq, drunning, dlearned,
    q_strides, k_strides, v_strides, mask_strides, grad_strides, dq_strides,
    H, GROUPS, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALE: tl.constexpr, CLAMP: tl.constexpr, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_QUERY: tl.constexpr,
    PRECISION: tl.constexpr, LONG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries.

    If given, also the queries' part of the gradient of their running sums, ``drunning`` [B, H, T],
    and each query's part of the gradient of the learned numbers, ``dlearned`` [B, H, T, N + 1].
    """
    SUM: tl.constexpr = grad_sum.dtype.element_ty
    FACTOR: tl.constexpr = tl.float32 if v.dtype.element_ty == tl.float16 else v.dtype.element_ty
    first, row, batch, head = own_tile(T, H, True, BLOCK_T)
    queries = first + tl.arange(0, BLOCK_T)
    q = at_head(q, q_strides, batch, head)
    k = at_head(k, k_strides, batch, head // GROUPS)
    v = at_head(v, v_strides, batch, head // GROUPS)
    if mask is not None:
        mask = at_head(mask, mask_strides, batch, head)
    if running is not None:
        running += row // GROUPS * S * 2
    if learned is not None:
        learned += head * len(COEFFICIENTS)
    global_start, global_end = global_range(span, batch)
    q_tile = load_features(q, queries, q_strides, T, SUM, MAP, D, BLOCK_D)
    grad = at_head(grad, grad_strides, batch, head)
    grad_tile = load_rows(grad, queries, grad_strides, T, E, BLOCK_E).to(FACTOR)
    grad_sums = tl.load(grad_sum + row * T + queries, mask=queries < T, other=0.0)[:, None]
    shift = None
    if maximum is not None:
        shift = tl.load(maximum + row * T + queries, mask=queries < T, other=0.0)[:, None]

    out = tl.full((BLOCK_T, BLOCK_D), 0.0, SUM)
    if drunning is not None:
        drunning_out = tl.full((BLOCK_T,), 0.0, SUM)
    if dlearned is not None:
        TERMS: tl.constexpr = triton.next_power_of_2(len(COEFFICIENTS))
        terms = tl.arange(0, TERMS)[None, :]
        dlearned_out = tl.full((BLOCK_T, TERMS), 0.0, SUM)
    for EDGE in tl.static_range(2):
        start, end = key_range(
            EDGE, first, mask, T, S, global_start, global_end, CAUSAL, WINDOW, BLOCK_T, BLOCK_S
        )
        for key in range(start, end, BLOCK_S):
            keys = key + tl.arange(0, BLOCK_S)
            down, across = queries[:, None], keys[None, :]
            k_tile = load_features(k, keys, k_strides, S, SUM, MAP, D, BLOCK_D)
            v_tile = load_rows(v, keys, v_strides, S, E, BLOCK_E).to(FACTOR)
            scores = _product(q_tile, tl.trans(k_tile), SUM, PRECISION) * SCALE
            fading = fading_between(running, down, across, T, S)
            visible = visible_pairs(
                EDGE, mask, mask_strides, down, across, T, S, global_end, CAUSAL, WINDOW, BY_QUERY
            )
            x = _clamped(scores, CLAMP)
            weights = _weights(x, fading, shift, learned, COEFFICIENTS)
            slopes = _slopes(scores, weights, fading, learned, COEFFICIENTS, SLOPE, CLAMP)
            dweights = _product(grad_tile, tl.trans(v_tile), SUM, PRECISION) + grad_sums
            dscores = hide(slopes * dweights, visible)
            out = _add_product(out, dscores, k_tile.to(FACTOR), PRECISION)
            if drunning is not None:
                drunning_out += tl.sum(hide(weights * dweights, visible), 1)
            if dlearned is not None:
                term = dweights
                if fading is not None:
                    term *= tl.exp(fading)
                term, x = hide(term, visible), hide(x, visible)
                for n in tl.static_range(len(COEFFICIENTS)):
                    dlearned_out += tl.where(terms == n, tl.sum(term, 1)[:, None], 0.0)
                    term *= x
    out = map_backward(out * SCALE, q, queries, q_strides, T, MAP, D, BLOCK_D)
    store_rows(at_head(dq, dq_strides, batch, head), queries, dq_strides, T, out, D, BLOCK_D)
    if drunning is not None:
        tl.store(drunning + row * T + queries, drunning_out, mask=queries < T)
    if dlearned is not None:
        rows = row * T + queries[:, None]
        inside = (queries[:, None] < T) & (terms < len(COEFFICIENTS))
        tl.store(dlearned + rows * len(COEFFICIENTS) + terms, dlearned_out, mask=inside)


@triton.jit
def key_grads(
    q, k, v, mask, running, learned, span, maximum, grad, grad_sum, dk, dv, drunning,
    q_strides, k_strides, v_strides, mask_strides, grad_strides, dk_strides, dv_strides,
    H, GROUPS, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALE: tl.constexpr, CLAMP: tl.constexpr, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_QUERY: tl.constexpr,
    PRECISION: tl.constexpr, LONG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values; scores are transposed, [keys, queries].

    If given, also the keys' part of the gradient of their running sums, ``drunning`` [B, Hkv, S],
    times -1.
    """
    SUM: tl.constexpr = grad_sum.dtype.element_ty
    FACTOR: tl.constexpr = tl.float32 if v.dtype.element_ty == tl.float16 else v.dtype.element_ty
    first, row, batch, kv_head = own_tile(S, H // GROUPS, False, BLOCK_S)
    keys = first + tl.arange(0, BLOCK_S)
    k = at_head(k, k_strides, batch, kv_head)
    v = at_head(v, v_strides, batch, kv_head)
    if running is not None:
        running += row * S * 2
    global_start, global_end = global_range(span, batch)
    k_tile = load_features(k, keys, k_strides, S, SUM, MAP, D, BLOCK_D)
    v_tile = load_rows(v, keys, v_strides, S, E, BLOCK_E).to(FACTOR)

    dk_out = tl.full((BLOCK_S, BLOCK_D), 0.0, SUM)
    dv_out = tl.full((BLOCK_S, BLOCK_E), 0.0, SUM)
    if drunning is not None:
        drunning_out = tl.full((BLOCK_S,), 0.0, SUM)
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        sums_row = (batch * H + head) * T
        q_head = at_head(q, q_strides, batch, head)
        grad_head = at_head(grad, grad_strides, batch, head)
        mask_head = mask
        if mask is not None:
            mask_head = at_head(mask, mask_strides, batch, head)
        own = learned
        if learned is not None:
            own = learned + head * len(COEFFICIENTS)
        for EDGE in tl.static_range(2):
            start, end = query_range(
                EDGE, first, mask, T, S, global_start, global_end, CAUSAL, WINDOW, BLOCK_T, BLOCK_S
            )
            for query in range(start, end, BLOCK_T):
                queries = query + tl.arange(0, BLOCK_T)
                down, across = keys[:, None], queries[None, :]
                q_tile = load_features(q_head, queries, q_strides, T, SUM, MAP, D, BLOCK_D)
                grad_tile = load_rows(grad_head, queries, grad_strides, T, E, BLOCK_E).to(FACTOR)
                inside = queries < T
                grad_sums = tl.load(grad_sum + sums_row + queries, mask=inside, other=0.0)[None, :]
                shift = None
                if maximum is not None:
                    shift = tl.load(maximum + sums_row + queries, mask=inside, other=0.0)[None, :]
                scores = _product(k_tile, tl.trans(q_tile), SUM, PRECISION) * SCALE
                fading = fading_between(running, across, down, T, S)
                visible = visible_pairs(
                    EDGE, mask_head, mask_strides, across, down, T, S, global_end,
                    CAUSAL, WINDOW, BY_QUERY,
                )  # fmt: skip
                weights = _weights(_clamped(scores, CLAMP), fading, shift, own, COEFFICIENTS)
                slopes = _slopes(scores, weights, fading, own, COEFFICIENTS, SLOPE, CLAMP)
                dweights = _product(v_tile, tl.trans(grad_tile), SUM, PRECISION) + grad_sums
                dscores = hide(slopes * dweights, visible)
                if drunning is not None:
                    drunning_out += tl.sum(hide(weights * dweights, visible), 1)
                dv_out = _add_product(dv_out, hide(weights, visible), grad_tile, PRECISION)
                dk_out = _add_product(dk_out, dscores, q_tile.to(FACTOR), PRECISION)
    dk_out = map_backward(dk_out * SCALE, k, keys, k_strides, S, MAP, D, BLOCK_D)
    store_rows(at_head(dk, dk_strides, batch, kv_head), keys, dk_strides, S, dk_out, D, BLOCK_D)
    store_rows(at_head(dv, dv_strides, batch, kv_head), keys, dv_strides, S, dv_out, E, BLOCK_E)
    if drunning is not None:
        tl.store(drunning + row * S + keys, drunning_out, mask=keys < S)
