"""The cost model: whether a form of pairs or the chunked form is faster, and from which length.

In every form, a pair of a query and a key costs two products and some passes over its score. The
chunked form computes only the pairs within a chunk. In addition it builds the monomials of keys and
queries, adds those of the keys to the state, and multiplies the state by those of the queries. So
the work of a form is counted here, and ``speeds`` has the times of this machine. Both forms exist
twice: as operations of PyTorch and as C++ (``native``).

Times are those of a forward pass. In both forms, a backward pass takes about three times as long. A
decay per channel takes 2.3 to 2.9 times as long in both forms (3.9 in chunked for power 1), so that
it leaves the choice between them as it is. For a GPU the times are estimates, not measurements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from softmax_rnn.ops.forms import native_chunks, native_library
from softmax_rnn.ops.monomials import cumulative_dimension, degrees, state_rows
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.speeds import Engine, Speeds, Work, speeds
from softmax_rnn.ops.variants import resolve

_BLOCK_CALLS, _CHUNK_CALLS = 20, 30  # operations of PyTorch
_BLOCK = {"torch": 128, "native": 96}  # queries per block
_CHUNKS = (64, 128, 256, 512)
_HEADS = 8  # by default

# Monomials computed in one step, in elements. On a CPU they should fit its cache.
FEATURES = {"cpu": 2**19, "cuda": 2**28}
_MAX_HEAD_FEATURES = 2**25  # limit for one head if even its monomials exceed the cache


class Sizes(NamedTuple):
    """What the cost of a call depends on.

    Attributes:
        heads: key/value heads times batch.
        groups: query heads per key/value head.
        engine: what computes the chunked form.
    """

    spec: AttentionSpec
    queries: int
    keys: int
    d_k: int
    d_v: int
    causal: bool = True
    heads: int = _HEADS
    groups: int = 1
    engine: Engine = "torch"


def sizes_of(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Sizes:
    """The sizes of a call."""
    heads, groups = max(1, k.shape[0] * k.shape[1]), q.shape[1] // k.shape[1]
    engine: Engine = "native" if native_chunks.suits(spec, q, k) else "torch"
    return Sizes(
        spec, q.shape[2], k.shape[2], k.shape[3], v.shape[3], causal, heads, groups, engine
    )


def heads_per_step(spec: AttentionSpec, d_k: int, chunk: int, groups: int, device: str) -> int:
    """How many key/value heads fit the cache with their monomials of a chunk.

    Each has ``groups`` query heads.
    """
    rows = cumulative_dimension(d_k, degrees(spec)[1])
    return max(1, FEATURES.get(device, FEATURES["cuda"]) // (rows * chunk * (groups + 1)))


def work_of_pairs(sizes: Sizes, engine: Engine) -> Work:
    """What a form that computes every pair does for a head: half of those in a diagonal square."""
    block, queries, keys = _BLOCK[engine], sizes.queries, sizes.keys
    seen = keys - queries + (queries + block) / 2 if sizes.causal else keys
    window = sizes.spec.hiding_window
    if window is not None:  # a block needs the windows of all its queries
        seen = min(seen, window + block) + min(sizes.spec.global_keys, keys)
    blocks = math.ceil(queries / block)
    # Of PyTorch, an operation is for all heads.
    calls = blocks * _BLOCK_CALLS / sizes.heads if engine == "torch" else blocks * sizes.groups
    return _of_pairs(sizes, queries * seen * sizes.groups, calls)


def _of_pairs(sizes: Sizes, pairs: float, calls: float) -> Work:
    order = sizes.spec.order or 0
    products = pairs * (sizes.d_k + sizes.d_v)
    return Work(products, 0.0, pairs, pairs * order, calls, 1 / sizes.heads)


def work_of_chunks(sizes: Sizes, chunk: int | None = None) -> Work:
    """What the chunked form does for a head; by default with the best chunk length."""
    chunk = chunk or chunk_length(sizes)
    spec, queries, keys, d_k, d_v, causal, heads, groups, engine = sizes
    last, rows, chunks = degrees(spec)[1], state_rows(spec, d_k), math.ceil(keys / chunk)
    # The first chunk reads no state; the last chunk updates none.
    unused = min(chunk, queries) if causal else 0
    through_state = (queries - unused) * groups + keys - unused
    within = float(queries * min(chunk, queries) * groups if causal else 0)
    calls = chunks * (groups + 1.0)
    if engine == "torch":
        together = min(heads, heads_per_step(spec, d_k, chunk, 1, "cpu"))
        calls = chunks * (_CHUNK_CALLS + d_k * max(last - 1, 0)) / together
    work = _of_pairs(sizes, within, calls)
    monomials = cumulative_dimension(d_k, last) if last > 1 or engine == "torch" else 0
    return work._replace(
        multiply=work.multiply + through_state * rows * (d_v + 1),
        build=float(through_state * monomials + chunks * rows * (d_v + 1)),
    )


def cost_of_pairs(sizes: Sizes, engine: Engine, known: Speeds | None = None) -> float:
    """Nanoseconds of a form that computes every pair, per head; ``known`` or of this machine."""
    return work_of_pairs(sizes, engine).time((known or speeds(engine)).pairs)


def chunked_cost(sizes: Sizes, chunk: int | None = None, known: Speeds | None = None) -> float:
    """Nanoseconds of the chunked form, per head; by default with the best chunk length."""
    chunk = chunk or chunk_length(sizes, known)
    idle = 1.0
    if sizes.engine == "native":  # a thread has whole heads
        threads = native_library.threads()
        idle = threads * math.ceil(sizes.heads / threads) / sizes.heads
    return idle * work_of_chunks(sizes, chunk).time((known or speeds(sizes.engine)).chunks)


def chunk_length(sizes: Sizes, known: Speeds | None = None) -> int:
    """The number of keys per chunk with the lowest cost.

    Longer chunks compute more pairs; shorter chunks read and write the state more often. Lengths
    are excluded if the monomials of one head exceed a limit (except the shortest length).
    """
    if max(sizes.queries, sizes.keys) <= _CHUNKS[0]:  # one chunk, whatever its length
        return _CHUNKS[0]
    each = cumulative_dimension(sizes.d_k, degrees(sizes.spec)[1]) * (sizes.groups + 1)
    allowed = [chunk for chunk in _CHUNKS if chunk * each <= _MAX_HEAD_FEATURES] or _CHUNKS[:1]
    costs = [chunked_cost(sizes._replace(causal=True), chunk, known) for chunk in allowed]
    return allowed[costs.index(min(costs))]  # without a key function: torch.compile traces this


def crossover(
    spec: AttentionSpec | str,
    d_k: int,
    d_v: int,
    heads: int = _HEADS,
    *,
    engine: Engine = "torch",
    known: Speeds | None = None,
) -> int:
    """The approximate length from which the chunked form is faster than one that computes pairs.

    For causal attention with one query per key. Near this length both forms cost nearly the same,
    and the division into chunks and blocks may favour either.

    Args:
        spec: a finite series, or the name of a variant with one.
        d_k: key width.
        d_v: value width.
        heads: key/value heads times batch; with few heads, the overhead per head is larger.
        engine: ``torch`` for the forms ``blocked`` and ``chunked`` of PyTorch operations, or
            ``native`` for C++, which a CPU with g++ uses from 256 tokens on.
        known: the times of a machine; by default this one's.

    Raises:
        ValueError: for a spec without a state, as :func:`state_size`.
    """
    spec = resolve(spec)

    def wins(length: int) -> bool:
        sizes = Sizes(spec, length, length, d_k, d_v, heads=heads, engine=engine)
        return chunked_cost(sizes, known=known) <= cost_of_pairs(sizes, engine, known)

    # Search downwards: in a sequence of one chunk, both forms do the same work.
    high = 2**50
    while wins(high // 2) and high > 1:
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high
