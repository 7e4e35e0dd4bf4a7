"""What the blocked and the chunked form cost: which is the faster one, and from which length.

A pair of a query and a key costs two products and some passes over its score, in either form. The
chunked form meets only the pairs within a chunk, but builds the monomials of keys and queries, adds
the keys' to the state and reads the state with the queries'; all heads that fit the cache share the
overhead of a chunk. Forward times in nanoseconds on one core of a server CPU, fitted to
measurements (benchmarks/recurrence.py checks the choices that follow from them); the backward pass
costs either form about three times as much again. For a GPU they are a guess until measured there.
"""

from __future__ import annotations

import math

from softmax_rnn.ops.monomials import cumulative_dimension, degrees, state_rows
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.variants import resolve

_MULTIPLY = 0.015  # a multiply-add of a matrix product
_BUILD = 0.5  # an element of monomials
_PAIR, _POWER = 1.0, 0.13  # passes over a pair: mask and sums; a step of Horner's rule
_CALL = 3000.0  # an operation, whatever its size
_BLOCK_CALLS, _CHUNK_CALLS = 20, 30
_BLOCK = 128  # queries of a block: half of its last pairs are wasted
_CHUNKS = (64, 128, 256, 512)
_HEADS = 8  # where no number is given

# Monomials of one step, in elements: on a CPU they should stay in its cache.
FEATURES = {"cpu": 2**19, "cuda": 2**28}
_MOST_FEATURES = 2**25  # of one head, where even one is beyond the cache


def heads_together(spec: AttentionSpec, d_k: int, chunk: int, groups: int, device: str) -> int:
    """Key/value heads whose monomials of a chunk fit the cache, each with ``groups`` queries."""
    rows = cumulative_dimension(d_k, degrees(spec)[1])
    return max(1, FEATURES.get(device, FEATURES["cuda"]) // (rows * chunk * (groups + 1)))


def blocked_cost(
    spec: AttentionSpec,
    queries: int,
    keys: int,
    d_k: int,
    d_v: int,
    *,
    causal: bool = True,
    heads: int = _HEADS,
) -> float:
    """Of the blocked form, per head."""
    pairs = queries * (keys - queries + (queries + _BLOCK) / 2 if causal else keys)
    blocks = math.ceil(queries / _BLOCK)
    return pairs * _pair(spec, d_k, d_v) + blocks * _BLOCK_CALLS * _CALL / heads


def chunked_cost(
    spec: AttentionSpec,
    queries: int,
    keys: int,
    d_k: int,
    d_v: int,
    *,
    causal: bool = True,
    heads: int = _HEADS,
    chunk: int | None = None,
) -> float:
    """Of the chunked form, per head; with its best chunk length unless one is given."""
    sizes = (spec, queries, keys, d_k, d_v)
    if chunk is None:
        chunk = chunk_length(*sizes, heads=heads)
    last = degrees(spec)[1]
    rows = state_rows(spec, d_k)
    chunks = math.ceil(keys / chunk)
    # The first chunk has no state to read, the last none to add to.
    through_state = queries + keys - (2 * min(chunk, queries) if causal else 0)
    monomials = through_state * (
        _BUILD * cumulative_dimension(d_k, last) + _MULTIPLY * rows * (d_v + 1)
    )
    within = queries * min(chunk, queries) * _pair(spec, d_k, d_v) if causal else 0.0
    calls = _CHUNK_CALLS + d_k * max(last - 1, 0)
    states = chunks * rows * (d_v + 1) * _BUILD
    together = min(heads, heads_together(spec, d_k, chunk, 1, "cpu"))
    return monomials + within + states + chunks * calls * _CALL / together


def chunk_length(
    spec: AttentionSpec,
    queries: int,
    keys: int,
    d_k: int,
    d_v: int,
    *,
    heads: int = _HEADS,
    groups: int = 1,
) -> int:
    """Keys a chunk: long ones meet more pairs, short ones pass over the state more often.

    No longer than what keeps the monomials of one head within bounds, if a shorter one does.
    """
    sizes = (spec, queries, keys, d_k, d_v)
    each = cumulative_dimension(d_k, degrees(spec)[1]) * (groups + 1)
    lean = [chunk for chunk in _CHUNKS if chunk * each <= _MOST_FEATURES] or _CHUNKS[:1]
    costs = [chunked_cost(*sizes, chunk=chunk, heads=heads) for chunk in lean]
    return lean[costs.index(min(costs))]  # no key function: torch.compile traces this


def crossover(spec: AttentionSpec | str, d_k: int, d_v: int, heads: int = _HEADS) -> int:
    """About the length from which the chunked form beats the blocked one (causal, a query per key).

    Near it the two cost nearly the same, and steps of chunks and blocks may favour either.

    Args:
        spec: a finite series, or the name of a variant with one.
        d_k: key width.
        d_v: value width.
        heads: key/value heads times batch: few of them share the overhead less.

    Raises:
        ValueError: for the series exp, which has no chunked form.
    """
    spec = resolve(spec)

    def wins(length: int) -> bool:
        sizes = (spec, length, length, d_k, d_v)
        return chunked_cost(*sizes, heads=heads) <= blocked_cost(*sizes, heads=heads)

    # From above: a sequence of one chunk is the same work in either form.
    high = 2**50
    while wins(high // 2) and high > 1:
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def _pair(spec: AttentionSpec, d_k: int, d_v: int) -> float:
    return _MULTIPLY * (d_k + d_v) + _PAIR + _POWER * degrees(spec)[1]
