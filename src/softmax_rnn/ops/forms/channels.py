"""The layout of forms with a state, where the weight sum is one more value channel, and its noise.

The state is section 3.1's ``H^n`` (``reference.power_rnn``), all powers stacked.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops.forms.row_sums import RowSums, compute_dtype
from softmax_rnn.ops.monomials import degrees, dimension
from softmax_rnn.ops.series import PowerSeries
from softmax_rnn.ops.spec import AttentionSpec


def to_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    state: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scaled queries [N, D, G, T], keys [N, D, S], value channels [N, C, S], state [N, C, rows].

    N is B * Hkv. With a row sum there is one more channel, of ones. All channels of a hidden key
    are zero, so that it adds nothing to any sum.
    """
    dtype = compute_dtype(q.dtype)
    channels = v.to(dtype).mT
    if spec.row_sum is not None:
        channels = torch.cat([channels, channels.new_ones(*v.shape[:2], 1, v.shape[2])], dim=2)
    keys = k.to(dtype).mT
    if mask is not None:  # a factor of zero would keep a hidden NaN
        channels, keys = channels.masked_fill(~mask, 0.0), keys.masked_fill(~mask, 0.0)
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1)).movedim(-1, 2)
    queries = queries.flatten(0, 1) * spec.score_scale(q.shape[-1])
    keys, channels = (x.flatten(0, 1).contiguous() for x in (keys, channels))
    if state is not None:
        return queries, keys, channels, state.flatten(0, 1)
    if not keep_state:  # a state holds the keys as they are
        queries, keys = _balanced(queries, keys)
    return queries, keys, channels, None


def _balanced(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of equal size with the same products, as high powers of either overflow.

    The factor is a power of two for each head, so that nothing is rounded.
    """
    if not (q[0].numel() and k[0].numel()):
        return q, k
    largest = [x.detach().abs().flatten(1).amax(1) for x in (q, k)]
    exponent = ((largest[0].log2() - largest[1].log2()) / 2).round()
    ratio = torch.where(exponent.isfinite(), exponent, 0.0).exp2()
    return q / ratio.view(-1, 1, 1, 1), k * ratio.view(-1, 1, 1)


class Terms(NamedTuple):
    """The powers of a finite series, for keys of a width.

    Attributes:
        first: the lowest power.
        sizes: number of monomials of each.
        roots: the square root of each one's coefficient.
    """

    first: int
    sizes: tuple[int, ...]
    roots: tuple[float, ...]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def from_spec(cls, spec: AttentionSpec, width: int) -> Terms:
        """The powers of a spec."""
        first, last = degrees(spec)
        coefficients = PowerSeries.from_spec(spec).coefficients
        assert coefficients is not None
        sizes = tuple(dimension(width, n) for n in range(first, last + 1))
        return cls(first, sizes, tuple(math.sqrt(a) for a in coefficients[first:]))


def noise_bound(q: Tensor, state: Tensor, terms: Terms, weights: Tensor) -> Tensor:
    """The rounding error of a weight sum read from a state: [N, G * L] of queries [N, D, G * L].

    The products with the monomials can cancel to a small sum of ``w(q . k)``; their rounding error
    is relative to their size. For each power that is at most ``|q|^n`` times the norm of the
    state's monomials of that degree (Cauchy-Schwarz), for any lengths of keys and queries.
    """
    # Squares of high powers overflow float32; a device without float64 has to use it.
    wide = q.dtype if q.device.type == "mps" else torch.float64
    squares = state[:, -1].to(wide).square() * weights
    norms = [part.sum(1, keepdim=True).sqrt() for part in squares.split(terms.sizes, dim=1)]
    length = q.to(wide).square().sum(1).sqrt()
    noise = torch.zeros_like(length)
    for norm, root in zip(reversed(norms), reversed(terms.roots), strict=True):
        noise = torch.addcmul(norm * root, noise, length)
    if terms.first:
        noise = noise * length**terms.first
    return (_ROUNDING * torch.finfo(q.dtype).eps * noise).to(q.dtype)


def tightened(noise: Tensor, weight_sum: Tensor, row: Tensor, features: Tensor) -> Tensor:
    """The noise [N, L], from the products themselves where a sum is below their bound.

    Args:
        noise: of :func:`noise_bound`.
        weight_sum: [N, L].
        row: [N, rows], the weighted state of the weight sum.
        features: [N, rows, L], the queries' monomials.
    """
    if not (weight_sum.abs() < noise).any():
        return noise
    wide = noise.dtype if noise.device.type == "mps" else torch.float64
    products = row.to(wide).square().unsqueeze(1) @ features.to(wide).square()
    exact = _ROUNDING * torch.finfo(noise.dtype).eps * products.squeeze(1).sqrt()
    return noise.minimum(exact.to(noise.dtype))


# The errors of many products add up to a few units in the last place.
_ROUNDING = 4.0


def from_columns(
    sums: Tensor, spec: AttentionSpec, k: Tensor, state: Tensor | None, noise: Tensor | None
) -> RowSums:
    """[N, C, G, T], the state [N, C, rows] and the noise [N, G, T] in the layout of forms."""
    sums = sums.unflatten(0, k.shape[:2]).movedim(2, -1).flatten(1, 2)
    state = None if state is None else state.unflatten(0, k.shape[:2])
    if spec.row_sum is None:
        return RowSums(sums, state=state)
    noise = None if noise is None else noise.unflatten(0, k.shape[:2]).flatten(1, 2)
    return RowSums(sums[..., :-1], sums[..., -1], state=state, noise=noise)
