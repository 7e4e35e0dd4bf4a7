"""Rotary positions of another family's queries and keys, taken off again.

A family's module hands rotated queries and keys to its attention. It was given the cosines and
sines, and a rotation has an inverse, so what they were before is known up to rounding. How a family
lays out its rotations is found by trying the few ways there are on tokens that are all alike:
without positions, their queries and keys are alike as well.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softmax_rnn.ops import compute_dtype


class Rotation(NamedTuple):
    """How a family rotates pairs of channels.

    Attributes:
        channels: whether the ``first`` or the ``last`` channels turn, if not all of them do.
        pairs: a pair is one channel of each of two ``halves``, or two ``neighbours``.
        angles: an angle for each channel, in the order of such pairs, or for each pair ``once``.
    """

    channels: str
    pairs: str
    angles: str


NO_POSITIONS = "none"  # in queries and keys: a family may add them to its embeddings
ROTATIONS: dict[str, Rotation | None] = {NO_POSITIONS: None} | {
    " ".join(names): Rotation(*names)
    for names in itertools.product(
        ("first", "last"), ("halves", "neighbours"), ("halves", "neighbours", "once")
    )
}


def unrotated(x: Tensor, embeddings: Any, rotation: str) -> Tensor:
    """Queries or keys [B, H, T, D] as they were before a family's rotary positions.

    Args:
        x: rotated.
        embeddings: what the family's module takes as ``position_embeddings``: cosines and sines,
            each [B or 1, T, R], or complex numbers [B or 1, T, R / 2].
        rotation: a key of :data:`ROTATIONS`.

    Raises:
        ValueError: if these cannot have rotated x.
    """
    way = ROTATIONS[rotation]
    if way is None:
        return x
    cos, sin = _cosines_and_sines(embeddings)
    if way.angles != "once":
        cos, sin = (_pairs(angle, way.angles)[0] for angle in (cos, sin))
    width, total = 2 * cos.shape[-1], x.shape[-1]
    if not 0 < width <= total or cos.shape[-2] != x.shape[2]:
        raise ValueError(f"Angles {list(cos.shape)} cannot have rotated {list(x.shape)}.")
    sizes = (width, total - width) if way.channels == "first" else (total - width, width)
    parts = list(x.split(sizes, -1))
    turned = parts[way.channels == "last"]
    dtype = compute_dtype(x.dtype)
    cos, sin = (angle.unsqueeze(1).to(x.device, dtype) for angle in (cos, sin))
    first, second = (part.to(dtype) for part in _pairs(turned, way.pairs))
    # Some families scale the angles' cosines and sines; bfloat16 rounds them.
    size = cos.square() + sin.square()
    back = (first * cos + second * sin) / size, (second * cos - first * sin) / size
    found = torch.cat(back, -1) if way.pairs == "halves" else torch.stack(back, -1).flatten(-2)
    parts[way.channels == "last"] = found.to(x.dtype)
    return torch.cat(parts, -1)


def _cosines_and_sines(embeddings: Any) -> tuple[Tensor, Tensor]:
    """The angles' cosines and sines, [B or 1, T, ...]."""
    if isinstance(embeddings, Tensor) and embeddings.is_complex():
        found = [embeddings.real, embeddings.imag]
    elif isinstance(embeddings, tuple | list):
        found = list(embeddings)
    else:
        found = []
    if len(found) != 2 or any(not isinstance(x, Tensor) or x.ndim != 3 for x in found):
        raise ValueError("The positions of this module are not a pair of cosines and sines.")
    return found[0], found[1]


def _pairs(x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair of channels."""
    if x.shape[-1] % 2:
        raise ValueError(f"{x.shape[-1]} channels are no pairs.")
    if way == "halves":
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., ::2], x[..., 1::2]


def rotation_of(query: Tensor, key: Tensor, embeddings: Any) -> str | None:
    """The rotation of queries and keys of tokens that are alike; ``None`` if none fits.

    Args:
        query: [B, H, T, D], rotated, of the same hidden states at every position.
        key: [B, Hkv, T, D], likewise.
        embeddings: as in :func:`unrotated`.
    """
    for name in ROTATIONS:
        try:
            if all(_alike(unrotated(x, embeddings, name)) for x in (query, key)):
                return name
        except ValueError:
            continue
    return None


def _alike(x: Tensor) -> bool:
    """Whether x [B, H, T, D] is the same, and not 0, at every position."""
    tolerance = 0.05 if x.dtype.itemsize == 2 else 1e-3
    size = x.abs().amax()
    return bool(size > 0 and (x - x[:, :, :1]).abs().amax() <= tolerance * size)
