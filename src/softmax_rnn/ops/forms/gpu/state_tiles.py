"""Tiles of states for the kernels of the chunked form: monomials, and products with a state.

Arguments have the meanings that ``chunk_kernels.py`` gives them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softmax_rnn.ops.forms.gpu.tiles import load_rows

_SIDE = tl.constexpr(8)  # channels of a block
TILE = tl.constexpr(_SIDE * _SIDE)  # rows of a tile


@triton.jit
def product(a, b, SUM: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr):
    """The matrix product of rounded factors."""
    return tl.dot(a.to(FACTOR), b.to(FACTOR), input_precision=PRECISION, out_dtype=SUM)


@triton.jit
def _block(x, first, strides, tokens, end):
    """Channels ``first`` to ``first + 8`` of tokens, [tokens, 8]."""
    return load_rows(x + first * strides[3], tokens, strides, end, _SIDE, _SIDE)


@triton.jit
def pair_features(x, tile, blocks, strides, tokens, end):
    """The products of two blocks of channels, [tokens, 64]."""
    left = _block(x, tl.load(blocks + 2 * tile), strides, tokens, end)
    right = _block(x, tl.load(blocks + 2 * tile + 1), strides, tokens, end)
    return tl.reshape(left[:, :, None] * right[:, None, :], (left.shape[0], TILE))


@triton.jit
def linear_features(x, tile, strides, tokens, end, WIDTH: tl.constexpr):
    """The channels of a tile, and ones behind the last channel, [tokens, 64]."""
    channels = tl.arange(0, TILE)[None, :] + tile * TILE
    offsets = tokens[:, None].to(tl.int64) * strides[2] + channels * strides[3]
    found = tl.load(x + offsets, mask=(tokens[:, None] < end) & (channels < WIDTH), other=0.0)
    return tl.where(channels == WIDTH, 1.0, found)


@triton.jit
def load_extra(x, tokens, strides, end, CHANNELS: tl.constexpr):
    """The channel of the weight sum, [tokens]."""
    pointers = x + tokens.to(tl.int64) * strides[2] + CHANNELS * strides[3]
    return tl.load(pointers, mask=tokens < end, other=0.0)


@triton.jit
def store_extra(x, tokens, strides, end, values, CHANNELS: tl.constexpr):
    """The inverse of ``load_extra``."""
    pointers = x + tokens.to(tl.int64) * strides[2] + CHANNELS * strides[3]
    tl.store(pointers, values, mask=tokens < end)


@triton.jit
def load_state(
    state, factors, tile, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """A tile of rows times their factors, [channels, 64]."""
    rows, channels = tl.arange(0, TILE) + tile * TILE, tl.arange(0, BLOCK_C)
    inside = channels[:, None] < CHANNELS
    found = tl.load(state + channels[:, None] * ROWS + rows[None, :], mask=inside, other=0.0)
    return found * tl.load(factors + rows)[None, :]


@triton.jit
def load_extra_row(state, factors, tile, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """As ``load_state``, of the channel of the weight sum, [64]."""
    rows = tl.arange(0, TILE) + tile * TILE
    return tl.load(state + CHANNELS * ROWS + rows) * tl.load(factors + rows)


@triton.jit
def read_state(
    x, strides, tokens, end, state, factors, blocks,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, EXTRA: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The features of tokens times a state, [tokens, channels] and [tokens]."""
    SUM: tl.constexpr = x.dtype.element_ty
    out = tl.full((tokens.shape[0], BLOCK_C), 0.0, SUM)
    extra = tl.full((tokens.shape[0],), 0.0, SUM)
    for tile in range(PAIRS):
        features = pair_features(x, tile, blocks, strides, tokens, end)
        rows = load_state(state, factors, tile, ROWS, CHANNELS, BLOCK_C)
        out += product(features, tl.trans(rows), SUM, FACTOR, PRECISION)
        if EXTRA:
            row = load_extra_row(state, factors, tile, ROWS, CHANNELS)
            extra += tl.sum(features * row[None, :], 1)
    for tile in range(ROWS // TILE - PAIRS):
        features = linear_features(x, tile, strides, tokens, end, WIDTH)
        rows = load_state(state, factors, PAIRS + tile, ROWS, CHANNELS, BLOCK_C)
        out += product(features, tl.trans(rows), SUM, FACTOR, PRECISION)
        if EXTRA:
            row = load_extra_row(state, factors, PAIRS + tile, ROWS, CHANNELS)
            extra += tl.sum(features * row[None, :], 1)
    return out, extra


@triton.jit
def state_grad(
    x, strides, tokens, end, grad, grad_extra, state, factors, blocks, INNER: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
    EXTRA: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of ``x`` through what ``read_state`` returns, [tokens, BLOCK_D].

    If INNER, also the product of what it returns with the gradient, [tokens].
    """
    SUM: tl.constexpr = x.dtype.element_ty
    TOKENS: tl.constexpr = tokens.shape[0]
    BLOCKS: tl.constexpr = BLOCK_D // _SIDE
    out = tl.full((TOKENS, BLOCKS, _SIDE), 0.0, SUM)
    inner = tl.full((TOKENS,), 0.0, SUM)
    places = tl.arange(0, BLOCKS)[None, :, None] * _SIDE
    for tile in range(PAIRS):
        left, right = tl.load(blocks + 2 * tile), tl.load(blocks + 2 * tile + 1)
        rows = load_state(state, factors, tile, ROWS, CHANNELS, BLOCK_C)
        dfeatures = product(grad, rows, SUM, FACTOR, PRECISION)
        if EXTRA:
            row = load_extra_row(state, factors, tile, ROWS, CHANNELS)
            dfeatures += grad_extra[:, None] * row[None, :]
        pairs = tl.reshape(dfeatures, (TOKENS, _SIDE, _SIDE))
        own = _block(x, left, strides, tokens, end)
        dleft = tl.sum(pairs * _block(x, right, strides, tokens, end)[:, None, :], 2)
        dright = tl.sum(pairs * own[:, :, None], 1)
        if INNER:
            inner += tl.sum(own * dleft, 1)
        out += tl.where(places == left, dleft[:, None, :], 0.0)
        out += tl.where(places == right, dright[:, None, :], 0.0)
    total = tl.reshape(out, (TOKENS, BLOCK_D))
    if ROWS > PAIRS * TILE:  # the rows of the channels themselves, and that of ones
        rows, channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
        state += PAIRS * TILE
        factors += PAIRS * TILE
        inside = (channels[:, None] < CHANNELS) & (rows[None, :] < WIDTH)
        factor = tl.load(factors + rows, mask=rows < WIDTH, other=0.0)
        found = tl.load(state + channels[:, None] * ROWS + rows[None, :], mask=inside, other=0.0)
        linear = product(grad, found * factor[None, :], SUM, FACTOR, PRECISION)
        if EXTRA:
            row = tl.load(state + CHANNELS * ROWS + rows, mask=rows < WIDTH, other=0.0)
            linear += grad_extra[:, None] * (row * factor)[None, :]
        total += linear
        if INNER:
            inner += tl.sum(linear * load_rows(x, tokens, strides, end, WIDTH, BLOCK_D), 1)
            ones = tl.load(state + channels * ROWS + WIDTH, mask=channels < CHANNELS, other=0.0)
            constant = tl.sum(grad * ones[None, :], 1)
            if EXTRA:
                constant += grad_extra * tl.load(state + CHANNELS * ROWS + WIDTH)
            inner += constant * tl.load(factors + WIDTH)
    return total, inner
