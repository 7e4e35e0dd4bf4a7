"""How much work pairs and chunks are: which of the two ``auto`` takes, and how long chunks are.

Work is counted in multiply-adds. Of pairs: the products of every query with its keys, and of their
weights with the values. Of chunks: the products of monomials with values that add keys to the
state, and those that read it. One rule holds for C++ and PyTorch's operations, in both passes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from torch import Tensor

from softmax_rnn.ops.monomials import cumulative_dimension, degrees, state_rows
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.variants import resolve

# Fitted to the cells of benchmarks/results/{choice,recurrence}-cpu-*.json: in C++ and PyTorch, on
# two CPUs, the form that the rule takes is at most 1.15 times as slow as the other one.
_LEAST_GAIN = 1.5  # chunks build monomials besides
# Fewer tokens need a larger gain, and on a CPU at least so many: each power takes steps of its own.
_FEW, _LEAST_GAIN_OF_FEW = 1024, 2.5
_SHORTEST, _PER_POWER = 384, 128
# Within the chunked form, as many multiply-adds take as long as
_PASSES = 64  # the passes over a score
_BUILD = 20  # a number of a state that is written

_LENGTHS = (64, 128, 256, 512)  # of chunks
# Monomials computed in one step, in elements. On a CPU they should fit its cache.
FEATURES = {"cpu": 2**19, "cuda": 2**28}
_MAX_HEAD_FEATURES = 2**25  # limit for one head if even its monomials exceed the cache


class Sizes(NamedTuple):
    """What the work of a call depends on.

    Attributes:
        group: query heads per key/value head.
    """

    spec: AttentionSpec
    queries: int
    keys: int
    d_k: int
    d_v: int
    causal: bool = True
    group: int = 1


def sizes_of(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Sizes:
    """The sizes of a call."""
    group = q.shape[1] // k.shape[1]
    return Sizes(spec, q.shape[2], k.shape[2], k.shape[3], v.shape[3], causal, group)


def chunks_pay(sizes: Sizes, device: str = "cpu") -> bool:
    """Whether chunks are faster than all pairs."""
    tokens = max(sizes.queries, sizes.keys)
    if tokens < _shortest(sizes.spec, device):
        return False
    seen = sizes.keys - sizes.queries / 2 if sizes.causal else sizes.keys
    pairs = sizes.queries * seen * sizes.group * (sizes.d_k + sizes.d_v)
    through_state = sizes.queries * sizes.group + sizes.keys
    chunks = through_state * state_rows(sizes.spec, sizes.d_k) * (sizes.d_v + 1)
    return bool(pairs > (_LEAST_GAIN if tokens >= _FEW else _LEAST_GAIN_OF_FEW) * chunks)


def _shortest(spec: AttentionSpec, device: str) -> int:
    """The least number of tokens with which chunks may pay."""
    if device != "cpu":  # where the steps are launches
        return _FEW
    return min(_FEW, _SHORTEST + _PER_POWER * max(1, degrees(spec)[1]))


def chunk_length(sizes: Sizes) -> int:
    """The number of keys per chunk with the least work.

    A longer chunk computes more pairs; shorter chunks write the state more often, and let fewer
    tokens do without one. Lengths are excluded if the monomials of one head exceed a limit (except
    the shortest length).
    """
    spec, queries, keys, d_k, d_v, _, group = sizes
    tokens = max(queries, keys)
    if tokens <= _LENGTHS[0]:  # one chunk, whatever its length
        return _LENGTHS[0]
    rows = state_rows(spec, d_k)
    # Per token and multiply-add of its length: pairs within the chunk, less what a longer first
    # and last chunk save.
    saved = (group + 1) * rows * (d_v + 1 + _BUILD) / tokens
    more = group * (d_k + d_v + _PASSES) - saved
    best = math.sqrt(_BUILD * rows * (d_v + 1) / more) if more > 0 else math.inf
    monomials = cumulative_dimension(d_k, degrees(spec)[1]) * (group + 1)
    for length in _LENGTHS:
        longest = 2 * length * monomials > _MAX_HEAD_FEATURES
        if length >= tokens or length * math.sqrt(2) > best or longest:
            return length
    return _LENGTHS[-1]


def heads_per_step(spec: AttentionSpec, d_k: int, chunk: int, group: int, device: str) -> int:
    """How many key/value heads fit the cache with their monomials of a chunk.

    Each has ``group`` query heads.
    """
    assert spec.powers is not None
    rows = cumulative_dimension(d_k, spec.powers[1])
    return max(1, FEATURES.get(device, FEATURES["cuda"]) // (rows * chunk * (group + 1)))


def crossover(spec: AttentionSpec | str, d_k: int, d_v: int) -> int:
    """The length from which ``auto`` takes the chunked form rather than one that computes pairs.

    For causal attention with one query per key on a CPU. Near this length both take nearly the same
    time.

    Args:
        spec: a finite series, or the name of a variant with one.
        d_k: key width.
        d_v: value width.

    Raises:
        ValueError: for a spec without a state, as :func:`state_size`.
    """
    spec = resolve(spec)

    def pay(length: int) -> bool:
        return chunks_pay(Sizes(spec, length, length, d_k, d_v))

    high = _shortest(spec, "cpu")
    while not pay(high):
        high *= 2
    return bisect_left(range(high), True, lo=high // 2, key=pay)
