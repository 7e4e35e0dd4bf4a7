"""Tiles for the kernels of the triton form: their rows, their ranges, and pairs of positions.

Arguments have the meanings that ``pair_kernels.py`` gives them.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MIN_LENGTH = tl.constexpr(1e-12)  # as in torch.nn.functional.normalize


@triton.jit
def at_head(base, strides, batch, head):
    """The start of a head's matrix."""
    return base + batch * strides[0] + head * strides[1]


@triton.jit
def _offsets(rows, strides, BLOCK: tl.constexpr):
    return rows[:, None].to(tl.int64) * strides[2] + tl.arange(0, BLOCK)[None, :] * strides[3]


@triton.jit
def load_rows(
    base, rows, strides, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr = 0.0
):
    """Rows of a [length, WIDTH] matrix as [rows, BLOCK]; FILL outside it."""
    inside = rows[:, None] < length
    if WIDTH != BLOCK:
        inside = inside & (tl.arange(0, BLOCK)[None, :] < WIDTH)
    return tl.load(base + _offsets(rows, strides, BLOCK), mask=inside, other=FILL)


@triton.jit
def store_rows(base, rows, strides, length, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of ``load_rows``, in the type of the matrix."""
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
def load_features(
    base, rows, strides, length, SUM: tl.constexpr, MAP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``load_rows``, mapped by ``phi``; zeros outside the matrix."""
    FILL: tl.constexpr = float("-inf") if MAP == "elu1" else 0.0  # phi maps it to zero
    tile = load_rows(base, rows, strides, length, WIDTH, BLOCK, FILL)
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
def map_backward(
    grad, base, rows, strides, length, MAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradient of rows, from the gradient of their features; loads the rows again."""
    if MAP != "identity":
        x = load_rows(base, rows, strides, length, WIDTH, BLOCK).to(grad.dtype)
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
def own_tile(length, heads, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr):
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
def global_range(span, batch):
    """The range of keys that every query sees besides the window."""
    start = 0
    end = 0
    if span is not None:
        start = tl.load(span + 2 * batch)
        end = tl.load(span + 2 * batch + 1)
    return start, end


@triton.jit
def key_range(
    EDGE: tl.constexpr, first, mask, T, S, global_start, global_end,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The range of keys for the tile of queries at ``first``: whole tiles, or the rest (EDGE).

    With a window: the global keys before it, or the window (EDGE).
    """
    end = S
    whole = S // BLOCK_S * BLOCK_S
    if CAUSAL:
        end = tl.minimum(S, first + BLOCK_T + S - T)
        whole = tl.minimum(S, first + 1 + S - T) // BLOCK_S * BLOCK_S
    if mask is not None:
        whole = 0
    start = 0
    if WINDOW is not None:
        whole = tl.maximum(0, first + 1 + S - T - WINDOW) // BLOCK_S * BLOCK_S
        start = global_start // BLOCK_S * BLOCK_S
    if EDGE:
        start = whole
    elif WINDOW is not None:
        end = tl.minimum(whole, global_end)
    else:
        end = whole
    return start, end


@triton.jit
def query_range(
    EDGE: tl.constexpr, first, mask, T, S, global_start, global_end,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The range of queries for the tile of keys at ``first``: whole tiles, or the rest (EDGE)."""
    start = 0
    whole = 0
    if CAUSAL:
        start = tl.maximum(0, first + T - S) // BLOCK_T * BLOCK_T
        whole = tl.cdiv(tl.maximum(0, first + BLOCK_S - 1 + T - S), BLOCK_T) * BLOCK_T
    if mask is not None or WINDOW is not None:
        whole = T
    end = T
    if EDGE:
        end = tl.minimum(T, whole)
        if WINDOW is not None:
            has_global = (first < global_end) & (first + BLOCK_S > global_start)
            near = tl.minimum(T, first + BLOCK_S - 1 + T - S + WINDOW)
            end = tl.where(has_global, T, near)
    else:
        start = whole
    return start, end


@triton.jit
def visible_pairs(
    EDGE: tl.constexpr, mask, strides, queries, keys, T, S, global_end,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_QUERY: tl.constexpr,
):  # fmt: skip
    """Which pairs count, None for all; ``queries`` and ``keys`` broadcast to the tile."""
    visible = None
    if EDGE or WINDOW is not None:
        visible = (queries < T) & (keys < S)
        if CAUSAL:
            visible = visible & (keys <= queries + (S - T))
        if WINDOW is not None:
            visible = visible & ((keys > queries + (S - T - WINDOW)) | (keys < global_end))
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
def hide(x, visible, value: tl.constexpr = 0.0):
    """``value`` for pairs that do not count, even if they are NaN."""
    if visible is not None:
        x = tl.where(visible, x, value)
    return x


@triton.jit
def fading_between(running, queries, keys, T, S):
    """``G_t - G_s``, 0 for later keys; None without a decay. Positions broadcast to the tile."""
    fading = None
    if running is not None:
        at = queries + (S - T)
        # The first difference is exact where it is small, the second one is always small.
        fading = tl.load(running + 2 * at, at < S, 0.0) - tl.load(running + 2 * keys, keys < S, 0.0)
        running += 1
        lost = tl.load(running + 2 * at, at < S, 0.0) - tl.load(running + 2 * keys, keys < S, 0.0)
        fading = tl.minimum(fading + lost, 0.0)
    return fading
