"""The cost model: whether the blocked or the chunked form is faster, and from which length.

Either form pays for a pair of a query and a key with two products and some passes over its score.
The chunked form computes only the pairs within a chunk, but builds the monomials of keys and
queries, adds the keys' to the state and reads the state with the queries'; all heads that fit the
cache share the overhead of a chunk. Times are nanoseconds of a forward pass on one core of a server
CPU, fitted to measurements (benchmarks/recurrence.py checks the choices that follow); a backward
pass costs either form about three times as much again. For a GPU they are a guess, not measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

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


class Sizes(NamedTuple):
    """What the cost of a call depends on; ``heads`` is key/value heads times batch."""

    spec: AttentionSpec
    queries: int
    keys: int
    d_k: int
    d_v: int
    causal: bool = True
    heads: int = _HEADS
    groups: int = 1  # query heads a key/value head

    @property
    def pair(self) -> float:
        """The cost of a score and its weight."""
        return _MULTIPLY * (self.d_k + self.d_v) + _PAIR + _POWER * degrees(self.spec)[1]


def sizes_of(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Sizes:
    """The sizes of a call."""
    heads, groups = max(1, k.shape[0] * k.shape[1]), q.shape[1] // k.shape[1]
    return Sizes(spec, q.shape[2], k.shape[2], k.shape[3], v.shape[3], causal, heads, groups)


def heads_per_step(spec: AttentionSpec, d_k: int, chunk: int, groups: int, device: str) -> int:
    """Key/value heads whose monomials of a chunk fit the cache, each with ``groups`` queries."""
    rows = cumulative_dimension(d_k, degrees(spec)[1])
    return max(1, FEATURES.get(device, FEATURES["cuda"]) // (rows * chunk * (groups + 1)))


def blocked_cost(sizes: Sizes) -> float:
    """The cost of the blocked form, per head."""
    queries, keys = sizes.queries, sizes.keys
    pairs = queries * (keys - queries + (queries + _BLOCK) / 2 if sizes.causal else keys)
    blocks = math.ceil(queries / _BLOCK)
    return pairs * sizes.pair + blocks * _BLOCK_CALLS * _CALL / sizes.heads


def chunked_cost(sizes: Sizes, chunk: int | None = None) -> float:
    """The cost of the chunked form, per head; with its best chunk length unless one is given."""
    spec, queries, keys, d_k, d_v, causal, heads, _ = sizes
    if chunk is None:
        chunk = chunk_length(sizes._replace(causal=True, groups=1))
    last = degrees(spec)[1]
    rows = state_rows(spec, d_k)
    chunks = math.ceil(keys / chunk)
    # The first chunk has no state to read, the last none to add to.
    through_state = queries + keys - (2 * min(chunk, queries) if causal else 0)
    monomials = through_state * (
        _BUILD * cumulative_dimension(d_k, last) + _MULTIPLY * rows * (d_v + 1)
    )
    within = queries * min(chunk, queries) * sizes.pair if causal else 0.0
    calls = _CHUNK_CALLS + d_k * max(last - 1, 0)
    states = chunks * rows * (d_v + 1) * _BUILD
    together = min(heads, heads_per_step(spec, d_k, chunk, 1, "cpu"))
    return monomials + within + states + chunks * calls * _CALL / together


def chunk_length(sizes: Sizes) -> int:
    """Keys a chunk: long ones have more pairs, short ones pass over the state more often.

    The monomials of one head stay within bounds, if a chunk is short enough for that.
    """
    each = cumulative_dimension(sizes.d_k, degrees(sizes.spec)[1]) * (sizes.groups + 1)
    allowed = [chunk for chunk in _CHUNKS if chunk * each <= _MOST_FEATURES] or _CHUNKS[:1]
    costs = [chunked_cost(sizes._replace(causal=True), chunk) for chunk in allowed]
    return allowed[costs.index(min(costs))]  # no key function: torch.compile traces this


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
        sizes = Sizes(spec, length, length, d_k, d_v, heads=heads)
        return chunked_cost(sizes) <= blocked_cost(sizes)

    # From above: a sequence of one chunk is the same work in either form.
    high = 2**50
    while wins(high // 2) and high > 1:
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high
