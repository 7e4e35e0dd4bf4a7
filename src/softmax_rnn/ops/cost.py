"""The cost model: whether a form of pairs or the chunked form is faster, and from which length.

In every form, a pair of a query and a key costs two products and some passes over its score. The
chunked form computes only the pairs within a chunk. In addition it builds the monomials of keys and
queries, adds those of the keys to the state, and multiplies the state by those of the queries. All
heads that fit the cache share the overhead of a chunk.

Times are nanoseconds of a forward pass on one core of a server CPU, fitted to measurements
(benchmarks/recurrence.py checks the resulting choices). In both forms, a backward pass takes about
three times as long as a forward pass. A decay per channel takes 2.3 to 2.9 times as long in both
forms (3.9 in chunked for power 1), so that it leaves the choice between them as it is. For a GPU
the times are estimates, not measurements.
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
_PAIR, _POWER = 1.0, 0.13  # for each pair: mask and sums; one step of Horner's rule
_CALL = 3000.0  # the overhead of one operation
_BLOCK_CALLS, _CHUNK_CALLS = 20, 30
_BLOCK = 128  # queries per block; half of the pairs in its diagonal square are hidden
_NATIVE, _NATIVE_BLOCK = (0.005, 0.15, 0.02), 96  # multiply-add, pair, power; queries per block
_CHUNKS = (64, 128, 256, 512)
_HEADS = 8  # by default

# Monomials computed in one step, in elements. On a CPU they should fit its cache.
FEATURES = {"cpu": 2**19, "cuda": 2**28}
_MAX_HEAD_FEATURES = 2**25  # limit for one head if even its monomials exceed the cache


class Sizes(NamedTuple):
    """What the cost of a call depends on; ``heads`` is key/value heads times batch."""

    spec: AttentionSpec
    queries: int
    keys: int
    d_k: int
    d_v: int
    causal: bool = True
    heads: int = _HEADS
    groups: int = 1  # query heads per key/value head

    @property
    def pair(self) -> float:
        """The cost of a score and its weight."""
        return _MULTIPLY * (self.d_k + self.d_v) + _PAIR + _POWER * (self.spec.order or 0)


def sizes_of(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Sizes:
    """The sizes of a call."""
    heads, groups = max(1, k.shape[0] * k.shape[1]), q.shape[1] // k.shape[1]
    return Sizes(spec, q.shape[2], k.shape[2], k.shape[3], v.shape[3], causal, heads, groups)


def heads_per_step(spec: AttentionSpec, d_k: int, chunk: int, groups: int, device: str) -> int:
    """How many key/value heads fit the cache with their monomials of a chunk.

    Each has ``groups`` query heads.
    """
    rows = cumulative_dimension(d_k, degrees(spec)[1])
    return max(1, FEATURES.get(device, FEATURES["cuda"]) // (rows * chunk * (groups + 1)))


def blocked_cost(sizes: Sizes) -> float:
    """The cost of the blocked form, per head."""
    blocks = math.ceil(sizes.queries / _BLOCK)
    return _pairs(sizes, _BLOCK) * sizes.pair + blocks * _BLOCK_CALLS * _CALL / sizes.heads


def native_cost(sizes: Sizes) -> float:
    """The cost of the native form, per head: less for each pair, and no calls for each block."""
    multiply, pair, power = _NATIVE
    each = multiply * (sizes.d_k + sizes.d_v) + pair + power * (sizes.spec.order or 0)
    return _pairs(sizes, _NATIVE_BLOCK) * each


def _pairs(sizes: Sizes, block: int) -> float:
    """The pairs of a query and a key that blocks compute: half of those in a diagonal square."""
    queries, keys = sizes.queries, sizes.keys
    seen = keys - queries + (queries + block) / 2 if sizes.causal else keys
    window = sizes.spec.hiding_window
    if window is not None:  # a block needs the windows of all its queries
        seen = min(seen, window + block) + min(sizes.spec.global_keys, keys)
    return queries * seen


def chunked_cost(sizes: Sizes, chunk: int | None = None) -> float:
    """The cost of the chunked form, per head; by default with the best chunk length."""
    spec, queries, keys, d_k, d_v, causal, heads, _ = sizes
    if chunk is None:
        chunk = chunk_length(sizes._replace(causal=True, groups=1))
    last = degrees(spec)[1]
    rows = state_rows(spec, d_k)
    chunks = math.ceil(keys / chunk)
    # The first chunk reads no state; the last chunk updates none.
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
    """The number of keys per chunk with the lowest cost.

    Longer chunks compute more pairs; shorter chunks read and write the state more often. Lengths
    are excluded if the monomials of one head exceed a limit (except the shortest length).
    """
    if max(sizes.queries, sizes.keys) <= _CHUNKS[0]:  # one chunk, whatever its length
        return _CHUNKS[0]
    each = cumulative_dimension(sizes.d_k, degrees(sizes.spec)[1]) * (sizes.groups + 1)
    allowed = [chunk for chunk in _CHUNKS if chunk * each <= _MAX_HEAD_FEATURES] or _CHUNKS[:1]
    costs = [chunked_cost(sizes._replace(causal=True), chunk) for chunk in allowed]
    return allowed[costs.index(min(costs))]  # without a key function: torch.compile traces this


def crossover(spec: AttentionSpec | str, d_k: int, d_v: int, heads: int = _HEADS) -> int:
    """The approximate length from which the chunked form is faster than the blocked one.

    For causal attention with one query per key. Near this length both forms cost nearly the same,
    and the division into chunks and blocks may favour either. Where ``auto`` takes the native form
    in place of the blocked one, it changes at a greater length.

    Args:
        spec: a finite series, or the name of a variant with one.
        d_k: key width.
        d_v: value width.
        heads: key/value heads times batch; with few heads, the overhead per head is larger.

    Raises:
        ValueError: for a spec without a state, as :func:`state_size`.
    """
    spec = resolve(spec)

    def wins(length: int) -> bool:
        sizes = Sizes(spec, length, length, d_k, d_v, heads=heads)
        return chunked_cost(sizes) <= blocked_cost(sizes)

    # Search downwards: in a sequence of one chunk, both forms do the same work.
    high = 2**50
    while wins(high // 2) and high > 1:
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high
