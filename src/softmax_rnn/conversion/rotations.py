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
import torch.nn.functional as F
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
    if ROTATIONS[rotation] is None:
        return x
    dtype = compute_dtype(x.dtype)
    own, other, places = inverse_of(rotation, embeddings, *x.shape[2:], x.device, dtype)
    wide = x.to(dtype)
    return (wide * own).addcmul(wide.index_select(3, places), other).to(x.dtype)


# The last inverse and what it is of: all layers of a model get the same positions for a token.
_last: tuple[Any, tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] | None = None


def inverse_of(
    rotation: str, embeddings: Any, tokens: int, width: int, *kind: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of a rotation: ``x_d own_d + x_places(d) other_d``.

    ``kind`` is a device and a dtype. The factors are [B or 1, 1, T, width], the places [width].
    """
    global _last
    way = ROTATIONS[rotation]
    assert way is not None
    about = (way, width, tokens, *kind)
    one = tokens == 1 and _is_constant(embeddings)
    about = (*about, *(x._version for x in embeddings)) if one else about
    known = _last  # another thread may replace it
    if one and known is not None and known[0] is embeddings and known[1] == about:
        return known[2]
    cos, sin = _cosines_and_sines(embeddings)
    if way.angles != "once":
        cos, sin = (_pairs(angle, way.angles)[0] for angle in (cos, sin))
    turning = 2 * cos.shape[-1]
    if not 0 < turning <= width or cos.shape[-2] != tokens:
        raise ValueError(
            f"Angles {list(cos.shape)} cannot have rotated {tokens} tokens of width {width}."
        )
    cos, sin = (angle.unsqueeze(1).to(*kind) for angle in (cos, sin))
    # Some families scale the angles' cosines and sines; bfloat16 rounds them.
    size = cos.square() + sin.square()
    cos, sin = cos / size, sin / size
    channels = torch.arange(turning, device=cos.device)
    if way.pairs == "halves":
        own, other = torch.cat((cos, cos), -1), torch.cat((sin, -sin), -1)
        places = channels.roll(turning // 2)
    else:
        own, other = (torch.stack(x, -1).flatten(-2) for x in ((cos, cos), (sin, -sin)))
        places = channels ^ 1
    rest = width - turning
    before = rest if way.channels == "last" else 0
    around = before, rest - before
    own, other = F.pad(own, around, value=1.0), F.pad(other, around)
    places = torch.cat(
        (
            torch.arange(before, device=cos.device),
            places + before,
            torch.arange(before + turning, width, device=cos.device),
        )
    )
    if one:  # the tensors themselves, so that no others take their places
        _last = embeddings, about, (own, other, places)
    return own, other, places


def _is_constant(embeddings: Any) -> bool:
    """Whether changes of these numbers would be noticed, and none needs a gradient."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    plain = isinstance(embeddings, tuple)
    return plain and all(type(x) is Tensor and not x.is_inference() for x in embeddings)


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
