"""The kernels of the triton form: the sums, and the gradients of q and of k and v.

One program holds one tile and loops over other tiles. For the sums and the gradient of q, a tile of
queries loops over its visible keys. For the gradients of k and v, a tile of keys loops over the
queries that see them, and sums over the query heads of the group. Each output is written by one
program, so results do not depend on the order of programs. Tiles of future keys only are skipped.
Tiles in which every query sees every key need no check of positions.

Queries and keys are mapped by ``phi`` (MAP) when they are loaded. Gradients of features are mapped
back before they are stored, so features stay on the chip. A score ``s = SCALE * phi(q) . phi(k)``
has the weight ``w(min(s, CLAMP))``: the power series of COEFFICIENTS, unrolled by Horner's rule, or
exp if COEFFICIENTS is None. If this exp might overflow, the row ``maximum`` is subtracted from its
exponent; other weights need no maximum.

Scores, sums and ``phi`` are computed in float32 (float64 for float64 inputs). Features are rounded
to the dtype of the inputs. Factors of products with weights or gradients have this dtype too, but
float32 instead of float16: sums that are not normalised exceed the range of float16.

Pointers refer to queries [B, H, T, D], keys [B, Hkv, S, D], values and the numerator's gradient,
and a mask [B, H, T, S] of bytes. Each has four strides (0 where a mask is broadcast). The sums and
maxima are contiguous [B, H, T]. BY_QUERY is whether the mask differs between queries. LONG is
whether the autotuner treats the sequence as long. EDGE selects the tiles that need a check of
positions or mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
_MIN_LENGTH = tl.constexpr(1e-12)  # as in torch.nn.functional.normalize


@triton.jit
def _head(base, strides, batch, head):
    return base + batch * strides[0] + head * strides[1]


@triton.jit
def _offsets(rows, strides, BLOCK: tl.constexpr):
    return rows[:, None].to(tl.int64) * strides[2] + tl.arange(0, BLOCK)[None, :] * strides[3]


@triton.jit
def _load(
    base, rows, strides, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr = 0.0
):
    """Rows of a [length, WIDTH] matrix as [rows, BLOCK]; FILL outside it."""
    inside = rows[:, None] < length
    if WIDTH != BLOCK:
        inside = inside & (tl.arange(0, BLOCK)[None, :] < WIDTH)
    return tl.load(base + _offsets(rows, strides, BLOCK), mask=inside, other=FILL)


@triton.jit
def _store(base, rows, strides, length, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of ``_load``, in the type of the matrix."""
    inside = (rows[:, None] < length) & (tl.arange(0, BLOCK)[None, :] < WIDTH)
    pointers = base + _offsets(rows, strides, BLOCK)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _length(x):
    """The divisors of the cosine map [rows, 1], at least a minimum; and which are raised to it."""
    length = tl.sqrt(tl.sum(x * x, 1))[:, None]
    short = length < _MIN_LENGTH
    return tl.where(short, _MIN_LENGTH, length), short


@triton.jit
def _load_features(
    base, rows, strides, length, SUM: tl.constexpr, MAP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``_load``, mapped by ``phi``; zeros outside the matrix."""
    FILL: tl.constexpr = float("-inf") if MAP == "elu1" else 0.0  # phi maps it to zero
    tile = _load(base, rows, strides, length, WIDTH, BLOCK, FILL)
    if MAP != "identity":
        x = tile.to(SUM)
        if MAP == "elu1":
            x = tl.where(x > 0, x + 1, tl.exp(x))
        elif MAP == "relu":
            x = tl.where(x < 0, 0.0, x)
        elif MAP == "cosine":
            size, _ = _length(x)
            x = x * (1 / size)  # one division per row
        tile = x.to(tile.dtype)
    return tile


@triton.jit
def _map_backward(
    grad, base, rows, strides, length, MAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradient of rows, from the gradient of their features; loads the rows again."""
    if MAP != "identity":
        x = _load(base, rows, strides, length, WIDTH, BLOCK).to(grad.dtype)
        if MAP == "elu1":
            grad = tl.where(x > 0, grad, grad * tl.exp(x))
        elif MAP == "relu":
            grad = tl.where(x <= 0, 0.0, grad)
        elif MAP == "cosine":
            size, constant = _length(x)
            unit = tl.where(constant, 0.0, x / size)
            grad = (grad - unit * tl.sum(unit * grad, 1)[:, None]) / size
    return grad


@triton.jit
def _product(a, b, SUM: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=SUM)


@triton.jit
def _add_product(total, a, b, PRECISION: tl.constexpr):
    return tl.dot(a.to(b.dtype), b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _visible(mask, strides, queries, keys, T, S, CAUSAL: tl.constexpr, BY_QUERY: tl.constexpr):
    """Which pairs count; ``queries`` and ``keys`` are positions that broadcast to the tile."""
    visible = (queries < T) & (keys < S)
    if CAUSAL:
        visible = visible & (keys <= queries + (S - T))
    if mask is not None:
        offsets = keys.to(tl.int64) * strides[3]
        if BY_QUERY:
            offsets = offsets + queries.to(tl.int64) * strides[2]
            shown = tl.load(mask + offsets, mask=visible, other=0)
        else:  # read once per tile, not per row
            shown = tl.load(mask + offsets, mask=keys < S, other=0)
        visible = visible & (shown != 0)
    return visible


@triton.jit
def _series(x, COEFFICIENTS: tl.constexpr):
    if COEFFICIENTS is None:
        result = tl.exp(x)
    else:
        ORDER: tl.constexpr = len(COEFFICIENTS) - 1
        result = tl.full(x.shape, COEFFICIENTS[ORDER], x.dtype)
        for n in tl.static_range(ORDER):
            result *= x
            if COEFFICIENTS[ORDER - 1 - n] != 0:
                result += COEFFICIENTS[ORDER - 1 - n]
    return result


@triton.jit
def _clamped(scores, CLAMP: tl.constexpr):
    if CLAMP is not None:
        scores = tl.where(scores > CLAMP, CLAMP, scores)  # tl.minimum would drop a NaN
    return scores


@triton.jit
def _weights_and_slopes(
    scores, shift, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr, CLAMP: tl.constexpr
):
    """The weights of unclamped scores, and the derivatives of the weights."""
    x = _clamped(scores, CLAMP)
    if shift is not None:
        x = x - shift
    weights = _series(x, COEFFICIENTS)
    slopes = weights
    if COEFFICIENTS is not None:
        slopes = _series(x, SLOPE)
    if CLAMP is not None:
        slopes = tl.where(scores > CLAMP, 0.0, slopes)
    return weights, slopes


@triton.jit
def _own_tile(length, heads, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """The first row of a program's tile, its index over batch and heads, its batch, its head.

    Programs with the most work start first: the last queries see the most keys, and the most
    queries see the first keys.
    """
    tiles = tl.cdiv(length, BLOCK)
    tile = tl.program_id(0) % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    row = (tl.program_id(0) // tiles).to(tl.int64)
    return tile * BLOCK, row, row // heads, row % heads


@triton.jit
def _key_range(
    EDGE: tl.constexpr, first, mask, T, S,
    CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The range of keys for the tile of queries at ``first``: whole tiles, or the rest (EDGE)."""
    end = S
    whole = S // BLOCK_S * BLOCK_S
    if CAUSAL:
        end = tl.minimum(S, first + BLOCK_T + S - T)
        whole = tl.minimum(S, first + 1 + S - T) // BLOCK_S * BLOCK_S
    if mask is not None:
        whole = 0
    start = 0
    if EDGE:
        start = whole
    else:
        end = whole
    return start, end


@triton.jit
def _query_range(
    EDGE: tl.constexpr, first, mask, T, S,
    CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The range of queries for the tile of keys at ``first``: whole tiles, or the rest (EDGE)."""
    start = 0
    whole = 0
    if CAUSAL:
        start = tl.maximum(0, first + T - S) // BLOCK_T * BLOCK_T
        whole = tl.cdiv(tl.maximum(0, first + BLOCK_S - 1 + T - S), BLOCK_T) * BLOCK_T
    if mask is not None:
        whole = T
    end = T
    if EDGE:
        end = tl.minimum(T, whole)
    else:
        start = whole
    return start, end


@triton.jit
def sums(
    q, k, v, mask, numerator, weight_sum, maximum,
    q_strides, k_strides, v_strides, mask_strides, numerator_strides,
    H, GROUPS, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALE: tl.constexpr, CLAMP: tl.constexpr, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_QUERY: tl.constexpr, PRECISION: tl.constexpr,
    LONG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Numerator, weight sum and, where ``maximum`` is given, row maximum of a tile of queries."""
    SUM: tl.constexpr = weight_sum.dtype.element_ty
    FACTOR: tl.constexpr = tl.float32 if v.dtype.element_ty == tl.float16 else v.dtype.element_ty
    first, row, batch, head = _own_tile(T, H, True, BLOCK_T)
    queries = first + tl.arange(0, BLOCK_T)
    q = _head(q, q_strides, batch, head)
    k = _head(k, k_strides, batch, head // GROUPS)
    v = _head(v, v_strides, batch, head // GROUPS)
    if mask is not None:
        mask = _head(mask, mask_strides, batch, head)
    q_tile = _load_features(q, queries, q_strides, T, SUM, MAP, D, BLOCK_D)

    out = tl.full((BLOCK_T, BLOCK_E), 0.0, SUM)
    total = tl.full((BLOCK_T,), 0.0, SUM)
    top = tl.full((BLOCK_T,), float("-inf"), SUM)
    for EDGE in tl.static_range(2):
        start, end = _key_range(EDGE, first, mask, T, S, CAUSAL, BLOCK_T, BLOCK_S)
        for key in range(start, end, BLOCK_S):
            keys = key + tl.arange(0, BLOCK_S)
            k_tile = _load_features(k, keys, k_strides, S, SUM, MAP, D, BLOCK_D)
            v_tile = _load(v, keys, v_strides, S, E, BLOCK_E).to(FACTOR)
            scores = _product(q_tile, tl.trans(k_tile), SUM, PRECISION) * SCALE
            scores = _clamped(scores, CLAMP)
            if EDGE:
                visible = _visible(
                    mask, mask_strides, queries[:, None], keys[None, :], T, S, CAUSAL, BY_QUERY
                )
            if maximum is not None:
                if EDGE:
                    scores = tl.where(visible, scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.exp(scores - shift[:, None])
                decay = tl.exp(top - shift)
                total *= decay
                out *= decay[:, None]
                top = higher
            else:
                weights = _series(scores, COEFFICIENTS)
                if EDGE:
                    weights = tl.where(visible, weights, 0.0)
            total += tl.sum(weights, 1)
            out = _add_product(out, weights, v_tile, PRECISION)
    numerator = _head(numerator, numerator_strides, batch, head)
    _store(numerator, queries, numerator_strides, T, out, E, BLOCK_E)
    tl.store(weight_sum + row * T + queries, total, mask=queries < T)
    if maximum is not None:
        top = tl.where(top == float("-inf"), 0.0, top)
        tl.store(maximum + row * T + queries, top, mask=queries < T)


@triton.jit
def query_grads(
    q, k, v, mask, maximum, grad, grad_sum, dq,
    q_strides, k_strides, v_strides, mask_strides, grad_strides, dq_strides,
    H, GROUPS, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALE: tl.constexpr, CLAMP: tl.constexpr, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_QUERY: tl.constexpr, PRECISION: tl.constexpr,
    LONG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries."""
    SUM: tl.constexpr = grad_sum.dtype.element_ty
    FACTOR: tl.constexpr = tl.float32 if v.dtype.element_ty == tl.float16 else v.dtype.element_ty
    first, row, batch, head = _own_tile(T, H, True, BLOCK_T)
    queries = first + tl.arange(0, BLOCK_T)
    q = _head(q, q_strides, batch, head)
    k = _head(k, k_strides, batch, head // GROUPS)
    v = _head(v, v_strides, batch, head // GROUPS)
    if mask is not None:
        mask = _head(mask, mask_strides, batch, head)
    grad = _head(grad, grad_strides, batch, head)
    q_tile = _load_features(q, queries, q_strides, T, SUM, MAP, D, BLOCK_D)
    grad_tile = _load(grad, queries, grad_strides, T, E, BLOCK_E).to(FACTOR)
    grad_sums = tl.load(grad_sum + row * T + queries, mask=queries < T, other=0.0)[:, None]
    shift = None
    if maximum is not None:
        shift = tl.load(maximum + row * T + queries, mask=queries < T, other=0.0)[:, None]

    out = tl.full((BLOCK_T, BLOCK_D), 0.0, SUM)
    for EDGE in tl.static_range(2):
        start, end = _key_range(EDGE, first, mask, T, S, CAUSAL, BLOCK_T, BLOCK_S)
        for key in range(start, end, BLOCK_S):
            keys = key + tl.arange(0, BLOCK_S)
            k_tile = _load_features(k, keys, k_strides, S, SUM, MAP, D, BLOCK_D)
            v_tile = _load(v, keys, v_strides, S, E, BLOCK_E).to(FACTOR)
            scores = _product(q_tile, tl.trans(k_tile), SUM, PRECISION) * SCALE
            dweights = _product(grad_tile, tl.trans(v_tile), SUM, PRECISION) + grad_sums
            _, slopes = _weights_and_slopes(scores, shift, COEFFICIENTS, SLOPE, CLAMP)
            dscores = slopes * dweights
            if EDGE:
                visible = _visible(
                    mask, mask_strides, queries[:, None], keys[None, :], T, S, CAUSAL, BY_QUERY
                )
                dscores = tl.where(visible, dscores, 0.0)
            out = _add_product(out, dscores, k_tile.to(FACTOR), PRECISION)
    out = _map_backward(out * SCALE, q, queries, q_strides, T, MAP, D, BLOCK_D)
    _store(_head(dq, dq_strides, batch, head), queries, dq_strides, T, out, D, BLOCK_D)


@triton.jit
def key_grads(
    q, k, v, mask, maximum, grad, grad_sum, dk, dv,
    q_strides, k_strides, v_strides, mask_strides, grad_strides, dk_strides, dv_strides,
    H, GROUPS, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALE: tl.constexpr, CLAMP: tl.constexpr, COEFFICIENTS: tl.constexpr, SLOPE: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, BY_QUERY: tl.constexpr, PRECISION: tl.constexpr,
    LONG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values; scores are transposed, [keys, queries]."""
    SUM: tl.constexpr = grad_sum.dtype.element_ty
    FACTOR: tl.constexpr = tl.float32 if v.dtype.element_ty == tl.float16 else v.dtype.element_ty
    first, _, batch, kv_head = _own_tile(S, H // GROUPS, False, BLOCK_S)
    keys = first + tl.arange(0, BLOCK_S)
    k = _head(k, k_strides, batch, kv_head)
    v = _head(v, v_strides, batch, kv_head)
    k_tile = _load_features(k, keys, k_strides, S, SUM, MAP, D, BLOCK_D)
    v_tile = _load(v, keys, v_strides, S, E, BLOCK_E).to(FACTOR)

    dk_out = tl.full((BLOCK_S, BLOCK_D), 0.0, SUM)
    dv_out = tl.full((BLOCK_S, BLOCK_E), 0.0, SUM)
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        sums_row = (batch * H + head) * T
        q_head = _head(q, q_strides, batch, head)
        grad_head = _head(grad, grad_strides, batch, head)
        mask_head = mask
        if mask is not None:
            mask_head = _head(mask, mask_strides, batch, head)
        for EDGE in tl.static_range(2):
            start, end = _query_range(EDGE, first, mask, T, S, CAUSAL, BLOCK_T, BLOCK_S)
            for query in range(start, end, BLOCK_T):
                queries = query + tl.arange(0, BLOCK_T)
                q_tile = _load_features(q_head, queries, q_strides, T, SUM, MAP, D, BLOCK_D)
                grad_tile = _load(grad_head, queries, grad_strides, T, E, BLOCK_E).to(FACTOR)
                inside = queries < T
                grad_sums = tl.load(grad_sum + sums_row + queries, mask=inside, other=0.0)[None, :]
                shift = None
                if maximum is not None:
                    shift = tl.load(maximum + sums_row + queries, mask=inside, other=0.0)[None, :]
                scores = _product(k_tile, tl.trans(q_tile), SUM, PRECISION) * SCALE
                weights, slopes = _weights_and_slopes(scores, shift, COEFFICIENTS, SLOPE, CLAMP)
                dweights = _product(v_tile, tl.trans(grad_tile), SUM, PRECISION) + grad_sums
                dscores = slopes * dweights
                if EDGE:
                    across = queries[None, :]
                    visible = _visible(
                        mask_head, mask_strides, across, keys[:, None], T, S, CAUSAL, BY_QUERY
                    )
                    weights = tl.where(visible, weights, 0.0)
                    dscores = tl.where(visible, dscores, 0.0)
                dv_out = _add_product(dv_out, weights, grad_tile, PRECISION)
                dk_out = _add_product(dk_out, dscores, q_tile.to(FACTOR), PRECISION)
    dk_out = _map_backward(dk_out * SCALE, k, keys, k_strides, S, MAP, D, BLOCK_D)
    _store(_head(dk, dk_strides, batch, kv_head), keys, dk_strides, S, dk_out, D, BLOCK_D)
    _store(_head(dv, dv_strides, batch, kv_head), keys, dv_strides, S, dv_out, E, BLOCK_E)
