"""The kernels of the chunked form for series of order 1 and 2: monomials stay on the chip.

A state has a row per monomial and a column per channel of the values. Its rows are in tiles of 64.
The tile of two blocks of 8 key channels, ``i <= j``, has their 64 products; ``blocks`` [PAIRS, 2]
are their first channels. A product within one block is stored twice, any other one once, so that
the latter counts twice. Behind these tiles are those of the channels themselves, then a row of
ones. Rows have up to two factors: COUNTS, how often a row counts, and coefficients of the series.

States are [X, SLOTS, channels, rows], a slot per boundary of chunks. Keys at the positions of the
queries form chunks of CHUNK tokens, and the ``before`` keys before them one chunk of any length.
There ``skip`` slots come first. If EXTRA, there is one more channel than CHANNELS: that of the
weight sum, which is computed without products of a lower precision.

Tensors of tokens are [X, R, tokens, channels] with four strides; R is 1 for keys and values.
Factors of fading are contiguous: of queries or keys [X, tokens], of whole chunks [X, CHUNKS]. Sums
have the type of the tensors, factors of products are rounded to FACTOR.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softmax_rnn.ops.forms.gpu.state_tiles import (
    TILE,
    linear_features,
    load_extra,
    pair_features,
    product,
    read_state,
    state_grad,
    store_extra,
)
from softmax_rnn.ops.forms.gpu.tiles import (
    at_head,
    fading_between,
    hide,
    load_rows,
    store_rows,
)

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _add_tokens(
    x, values, fading, blocks, x_strides, value_strides, n, tile, start, end, length, GROUPS,
    LINEAR: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
    EXTRA: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over tokens of features times values, [64, channels], and [64] of the extra one."""
    SUM: tl.constexpr = x.dtype.element_ty
    out = tl.full((TILE, BLOCK_C), 0.0, SUM)
    extra = tl.full((TILE,), 0.0, SUM)
    for group in range(GROUPS):
        x_head = at_head(x, x_strides, n, group)
        values_head = at_head(values, value_strides, n, group)
        for first in range(start, end, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            if LINEAR:
                features = linear_features(x_head, tile, x_strides, tokens, end, WIDTH)
            else:
                features = pair_features(x_head, tile, blocks, x_strides, tokens, end)
            added = load_rows(values_head, tokens, value_strides, end, CHANNELS, BLOCK_C)
            if fading is not None:
                factors = tl.load(fading + n * length + tokens, mask=tokens < end, other=0.0)
                added *= factors[:, None]
            out += product(tl.trans(features), added, SUM, FACTOR, PRECISION)
            if EXTRA:
                weights = load_extra(values_head, tokens, value_strides, end, CHANNELS)
                if fading is not None:
                    weights *= factors
                extra += tl.sum(features * weights[:, None], 0)
    return out, extra


@triton.jit
def add_states(
    x, values, fading, blocks, factors, states, x_strides, value_strides,
    GROUPS, SLOTS, length, before, skip, CHUNK,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, EXTRA: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to a tile of rows of the state; a row's ``factors`` are optional.

    Slot ``skip + c`` gets chunk ``c`` of those after ``before``, slot 1 the tokens before.
    """
    TILES: tl.constexpr = ROWS // TILE
    tile = tl.program_id(0) % TILES
    slot = tl.program_id(0) // TILES % SLOTS
    n = (tl.program_id(0) // (TILES * SLOTS)).to(tl.int64)
    start = before + (slot - skip) * CHUNK
    end = tl.minimum(length, start + CHUNK)
    end = tl.where(slot >= skip, end, tl.where(slot == 1, before, 0))
    start = tl.where(slot >= skip, start, 0)
    if tile < PAIRS:
        out, extra = _add_tokens(
            x, values, fading, blocks, x_strides, value_strides, n, tile, start, end, length,
            GROUPS, False, WIDTH, CHANNELS, BLOCK_C, EXTRA, FACTOR, PRECISION, BLOCK,
        )  # fmt: skip
    else:
        out, extra = _add_tokens(
            x, values, fading, blocks, x_strides, value_strides, n, tile - PAIRS, start, end,
            length, GROUPS, True, WIDTH, CHANNELS, BLOCK_C, EXTRA, FACTOR, PRECISION, BLOCK,
        )  # fmt: skip
    rows, channels = tl.arange(0, TILE) + tile * TILE, tl.arange(0, BLOCK_C)
    if factors is not None:
        own = tl.load(factors + rows)
        out *= own[:, None]
        extra *= own
    states += (n * SLOTS + slot) * (CHANNELS + EXTRA) * ROWS
    inside = channels[None, :] < CHANNELS
    tl.store(states + channels[None, :] * ROWS + rows[:, None], out, mask=inside)
    if EXTRA:
        tl.store(states + CHANNELS * ROWS + rows, extra)


@triton.jit
def scan_states(
    states, kept, other, counts, inner, CHUNKS, SLOTS, OTHER_SLOTS, SIZE,
    ROWS: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to every slot the one before it, faded by ``kept``; REVERSED, the one after it.

    ``inner`` [X, SLOTS, programs] gets parts of the product of what is added with ``other`` states.
    """
    programs = tl.cdiv(SIZE, BLOCK)
    part = tl.program_id(0) % programs
    n = (tl.program_id(0) // programs).to(tl.int64)
    places = part * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    total = tl.full((BLOCK,), 0.0, states.dtype.element_ty)
    if inner is not None:
        count = tl.load(counts + places % ROWS, mask=inside, other=0.0)
    for step in range(SLOTS):
        slot = SLOTS - 1 - step if REVERSED else step
        if kept is not None:  # noqa: SIM102
            if step > 0:
                total *= tl.load(kept + n * CHUNKS + (slot if REVERSED else slot - 1))
        if inner is not None:
            theirs = other + (n * OTHER_SLOTS + slot) * SIZE + places
            found = tl.load(theirs, mask=inside & (slot < OTHER_SLOTS), other=0.0)
            tl.store(inner + (n * SLOTS + slot) * programs + part, tl.sum(found * total * count, 0))
        pointers = states + (n * SLOTS + slot) * SIZE + places
        total += tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, total, mask=inside)


@triton.jit
def _series(x, A0: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr):
    return A0 + x * (A1 + x * A2)


@triton.jit
def _pairs(
    q_tile, k_tile, running, queries, keys, n, length, before, A0: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of a chunk and their derivatives by the scores, [queries, keys].

    ``queries`` and ``keys`` are positions of those after ``before``; ``length`` is their number.
    """
    scores = product(q_tile, tl.trans(k_tile), q_tile.dtype, FACTOR, PRECISION)
    down, across = queries[:, None], keys[None, :]
    visible = (across <= down) & (down < length)
    scores = hide(scores, visible)  # those of later keys may overflow
    weights, slopes = _series(scores, A0, A1, A2), _series(scores, A1, 2.0 * A2, 0.0)
    if running is not None:
        keys_total = length + before
        own = running + n * keys_total * 2
        fading = tl.exp(fading_between(own, down, across + before, length, keys_total))
        weights *= fading
        slopes *= fading
    return hide(weights, visible), hide(slopes, visible)


@triton.jit
def _tile_of_queries(GROUPS, length, BLOCK: tl.constexpr):
    """A program's head, its group, and the first and all positions of its tile of queries."""
    tiles = tl.cdiv(length, BLOCK)
    first = tl.program_id(0) % tiles * BLOCK
    group = tl.program_id(0) // tiles % GROUPS
    n = (tl.program_id(0) // (tiles * GROUPS)).to(tl.int64)
    return n, group, first, first + tl.arange(0, BLOCK)


@triton.jit
def chunk_sums(
    q, k, v, running, fading, states, factors, blocks, sums,
    q_strides, k_strides, v_strides, sum_strides, GROUPS, SLOTS, length, before, skip, CHUNK,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
    EXTRA: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, A0: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr, CAUSAL: tl.constexpr, READ_EDGE: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of a tile of queries over the state and over the keys of their chunk."""
    SUM: tl.constexpr = q.dtype.element_ty
    n, group, first, queries = _tile_of_queries(GROUPS, length, BLOCK)
    chunk = first // CHUNK
    q = at_head(q, q_strides, n, group)
    states += (n * SLOTS + skip + chunk) * (CHANNELS + EXTRA) * ROWS

    out = tl.full((BLOCK, BLOCK_C), 0.0, SUM)
    extra = tl.full((BLOCK,), 0.0, SUM)
    if (chunk > 0) | READ_EDGE:
        out, extra = read_state(
            q, q_strides, queries, length, states, factors, blocks,
            WIDTH, CHANNELS, BLOCK_C, EXTRA, PAIRS, ROWS, FACTOR, PRECISION,
        )  # fmt: skip
    if fading is not None:
        read = tl.load(fading + n * length + queries, mask=queries < length, other=0.0)
        out *= read[:, None]
        extra *= read
    if CAUSAL:
        q_tile = load_rows(q, queries, q_strides, length, WIDTH, BLOCK_D)
        k = at_head(k, k_strides, n, 0)
        v = at_head(v, v_strides, n, 0)
        for key in range(chunk * CHUNK, first + BLOCK, BLOCK):
            keys = key + tl.arange(0, BLOCK)
            k_tile = load_rows(k, before + keys, k_strides, before + length, WIDTH, BLOCK_D)
            v_tile = load_rows(v, before + keys, v_strides, before + length, CHANNELS, BLOCK_C)
            weights, _ = _pairs(
                q_tile, k_tile, running, queries, keys, n, length, before,
                A0, A1, A2, FACTOR, PRECISION,
            )  # fmt: skip
            out += product(weights, v_tile, SUM, FACTOR, PRECISION)
            if EXTRA:
                values = load_extra(v, before + keys, v_strides, before + length, CHANNELS)
                extra += tl.sum(weights * values[None, :], 1)
    sums = at_head(sums, sum_strides, n, group)
    store_rows(sums, queries, sum_strides, length, out, CHANNELS, BLOCK_C)
    if EXTRA:
        store_extra(sums, queries, sum_strides, length, extra, CHANNELS)


@triton.jit
def chunk_query_grads(
    q, k, v, running, fading, states, factors, blocks, received, dsums, dq,
    q_strides, k_strides, v_strides, sum_strides, dq_strides,
    GROUPS, SLOTS, length, before, skip, CHUNK,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
    EXTRA: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, A0: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr, CAUSAL: tl.constexpr, READ_EDGE: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries.

    ``received`` [X, R, T, 2] gets the products of their sums with the gradient: what they read from
    the state, and from the other keys of their chunk.
    """
    SUM: tl.constexpr = q.dtype.element_ty
    n, group, first, queries = _tile_of_queries(GROUPS, length, BLOCK)
    chunk = first // CHUNK
    q = at_head(q, q_strides, n, group)
    dsums = at_head(dsums, sum_strides, n, group)
    grad = load_rows(dsums, queries, sum_strides, length, CHANNELS, BLOCK_C)
    grad_extra = tl.full((BLOCK,), 0.0, SUM)
    if EXTRA:
        grad_extra = load_extra(dsums, queries, sum_strides, length, CHANNELS)

    INNER: tl.constexpr = received is not None
    out = tl.full((BLOCK, BLOCK_D), 0.0, SUM)
    inner = tl.full((BLOCK,), 0.0, SUM)
    pairs = tl.full((BLOCK,), 0.0, SUM)
    if (chunk > 0) | READ_EDGE:
        states += (n * SLOTS + skip + chunk) * (CHANNELS + EXTRA) * ROWS
        out, inner = state_grad(
            q, q_strides, queries, length, grad, grad_extra, states, factors, blocks, INNER,
            WIDTH, BLOCK_D, CHANNELS, BLOCK_C, EXTRA, PAIRS, ROWS, FACTOR, PRECISION,
        )  # fmt: skip
    if fading is not None:
        read = tl.load(fading + n * length + queries, mask=queries < length, other=0.0)
        out *= read[:, None]
        inner *= read
    if CAUSAL:
        q_tile = load_rows(q, queries, q_strides, length, WIDTH, BLOCK_D)
        k = at_head(k, k_strides, n, 0)
        v = at_head(v, v_strides, n, 0)
        for key in range(chunk * CHUNK, first + BLOCK, BLOCK):
            keys = key + tl.arange(0, BLOCK)
            k_tile = load_rows(k, before + keys, k_strides, before + length, WIDTH, BLOCK_D)
            v_tile = load_rows(v, before + keys, v_strides, before + length, CHANNELS, BLOCK_C)
            weights, slopes = _pairs(
                q_tile, k_tile, running, queries, keys, n, length, before,
                A0, A1, A2, FACTOR, PRECISION,
            )  # fmt: skip
            dweights = product(grad, tl.trans(v_tile), SUM, FACTOR, PRECISION)
            if EXTRA:
                values = load_extra(v, before + keys, v_strides, before + length, CHANNELS)
                dweights += grad_extra[:, None] * values[None, :]
            out += product(slopes * dweights, k_tile, SUM, FACTOR, PRECISION)
            if INNER:
                others = queries[:, None] != keys[None, :]
                pairs += tl.sum(tl.where(others, weights * dweights, 0.0), 1)
    store_rows(at_head(dq, dq_strides, n, group), queries, dq_strides, length, out, WIDTH, BLOCK_D)
    if INNER:
        places = received + ((n * GROUPS + group) * length + queries) * 2
        tl.store(places, inner, mask=queries < length)
        tl.store(places + 1, pairs, mask=queries < length)


@triton.jit
def chunk_key_grads(
    q, k, v, running, fading, dstates, counts, blocks, received, dsums, dk, dv,
    q_strides, k_strides, v_strides, sum_strides, dk_strides, dv_strides,
    GROUPS, SLOTS, length, before, skip, CHUNK,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
    EXTRA: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, A0: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr, CAUSAL: tl.constexpr, READ_EDGE: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of keys or, without ``dk``, of values: both do not fit the registers.

    ``length`` is that of the queries. Tiles of the keys before them come first. ``received``
    [X, S, 2] gets the products of values with their gradient, as for queries.
    """
    SUM: tl.constexpr = k.dtype.element_ty
    earlier = tl.cdiv(before, BLOCK)
    tiles = earlier
    if CAUSAL:
        tiles += tl.cdiv(length, BLOCK)
    tile = tl.program_id(0) % tiles
    n = (tl.program_id(0) // tiles).to(tl.int64)
    own = (tile - earlier) * BLOCK  # the position among the keys that are in a chunk with queries
    first = tl.where(own >= 0, before + own, tile * BLOCK)
    keys_total = before + length if CAUSAL else before
    end = tl.where(own >= 0, keys_total, before)
    slot = tl.where(own >= 0, skip + own // CHUNK + 1, 1)
    keys = first + tl.arange(0, BLOCK)
    k = at_head(k, k_strides, n, 0)
    v = at_head(v, v_strides, n, 0)
    v_tile = load_rows(v, keys, v_strides, end, CHANNELS, BLOCK_C)
    v_extra = tl.full((BLOCK,), 0.0, SUM)
    if EXTRA:
        v_extra = load_extra(v, keys, v_strides, end, CHANNELS)
    dstates += (n * SLOTS + slot) * (CHANNELS + EXTRA) * ROWS

    out = tl.full((BLOCK, BLOCK_C if dk is None else BLOCK_D), 0.0, SUM)
    extra = tl.full((BLOCK,), 0.0, SUM)  # of the gradient of values
    INNER: tl.constexpr = received is not None
    inner = tl.full((BLOCK,), 0.0, SUM)
    pairs = tl.full((BLOCK,), 0.0, SUM)
    if (slot < SLOTS - 1) | READ_EDGE:
        if dk is None:
            out, extra = read_state(
                k, k_strides, keys, end, dstates, counts, blocks,
                WIDTH, CHANNELS, BLOCK_C, EXTRA, PAIRS, ROWS, FACTOR, PRECISION,
            )  # fmt: skip
        else:
            out, inner = state_grad(
                k, k_strides, keys, end, v_tile, v_extra, dstates, counts, blocks, INNER,
                WIDTH, BLOCK_D, CHANNELS, BLOCK_C, EXTRA, PAIRS, ROWS, FACTOR, PRECISION,
            )  # fmt: skip
    if fading is not None:
        added = tl.load(fading + n * keys_total + keys, mask=keys < end, other=0.0)
        out *= added[:, None]
        extra *= added
        inner *= added
    if CAUSAL:
        k_tile = load_rows(k, keys, k_strides, end, WIDTH, BLOCK_D)
        for group in range(GROUPS):
            q_head = at_head(q, q_strides, n, group)
            dsums_head = at_head(dsums, sum_strides, n, group)
            stop = tl.where(own >= 0, tl.minimum(length, (own // CHUNK + 1) * CHUNK), 0)
            for query in range(tl.maximum(own, 0), stop, BLOCK):
                queries = query + tl.arange(0, BLOCK)
                q_tile = load_rows(q_head, queries, q_strides, length, WIDTH, BLOCK_D)
                grad = load_rows(dsums_head, queries, sum_strides, length, CHANNELS, BLOCK_C)
                weights, slopes = _pairs(
                    q_tile, k_tile, running, queries, keys - before, n, length, before,
                    A0, A1, A2, FACTOR, PRECISION,
                )  # fmt: skip
                if EXTRA:
                    grad_extra = load_extra(dsums_head, queries, sum_strides, length, CHANNELS)
                if dk is None:
                    out += product(tl.trans(weights), grad, SUM, FACTOR, PRECISION)
                    if EXTRA:
                        extra += tl.sum(weights * grad_extra[:, None], 0)
                else:
                    dweights = product(grad, tl.trans(v_tile), SUM, FACTOR, PRECISION)
                    if EXTRA:
                        dweights += grad_extra[:, None] * v_extra[None, :]
                    dscores = tl.trans(slopes * dweights)
                    out += product(dscores, q_tile, SUM, FACTOR, PRECISION)
                    if INNER:
                        others = queries[:, None] != (keys - before)[None, :]
                        pairs += tl.sum(tl.where(others, weights * dweights, 0.0), 0)
    if dk is None:
        dv = at_head(dv, dv_strides, n, 0)
        store_rows(dv, keys, dv_strides, end, out, CHANNELS, BLOCK_C)
        if EXTRA:
            store_extra(dv, keys, dv_strides, end, extra, CHANNELS)
    else:
        store_rows(at_head(dk, dk_strides, n, 0), keys, dk_strides, end, out, WIDTH, BLOCK_D)
        if INNER:
            places = received + (n * keys_total + keys) * 2
            tl.store(places, inner, mask=keys < end)
            tl.store(places + 1, pairs, mask=keys < end)
