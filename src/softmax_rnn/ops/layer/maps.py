"""Feature maps of queries and keys that have parameters, or need positions.

They belong to the layer: the operation sees their results as its queries and keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.forms.row_sums import compute_dtype, no_autocast
from softmax_rnn.ops.forms.token import Features
from softmax_rnn.ops.layer.parts import LayerPart
from softmax_rnn.ops.options import LayerOptions
from softmax_rnn.ops.spec import AttentionSpec


class LayerMap(LayerPart):
    """A map of queries [B, H, T, D] and keys [B, Hkv, T, D] to features; by default none."""

    def __init__(self, heads: int, kv_heads: int, width: int, options: LayerOptions) -> None:
        super().__init__()

    @staticmethod
    def features(width: int, options: LayerOptions) -> int:
        """Number of features of a vector of ``width``."""
        return width

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries and keys at ``positions`` [B or 1, T], in float32 for half precision."""
        precise, dtype = compute_dtype(q.dtype), q.dtype
        with no_autocast(q.device.type):
            q, k = self.mapped(q.to(precise), k.to(precise), positions)
        return q.to(dtype), k.to(dtype)

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The features of queries and keys."""
        return q, k

    def in_cpp(self) -> Features | None:
        """What computes them of a token in C++; ``None`` where nothing does."""
        return None


class Cosine(LayerMap):
    """Unit vectors, whose length a learned temperature then sets (TaylorShift)."""

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``x / |x|``."""
        unit = FEATURE_MAPS["cosine"]
        return unit(q), unit(k)


class Hedgehog(LayerMap):
    """``[softmax(W x), softmax(-W x)]``, ``W`` per head; it starts as the identity."""

    def __init__(self, heads: int, kv_heads: int, width: int, options: LayerOptions) -> None:
        super().__init__(heads, kv_heads, width, options)
        self.q_matrix = nn.Parameter(torch.empty(heads, width, width))
        self.k_matrix = nn.Parameter(torch.empty(kv_heads, width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set ``W`` to the identity."""
        with torch.no_grad():
            for matrix in (self.q_matrix, self.k_matrix):
                matrix.copy_(torch.eye(matrix.shape[-1]))

    @staticmethod
    def features(width: int, options: LayerOptions) -> int:
        """One per entry of ``W x`` and of ``-W x``."""
        return 2 * width

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The two softmaxes."""
        found = []
        for x, matrix in ((q, self.q_matrix), (k, self.k_matrix)):
            y = x @ matrix.to(x.dtype).mT
            found.append(torch.cat((y.softmax(-1), (-y).softmax(-1)), dim=-1))
        return found[0], found[1]

    def in_cpp(self) -> Features:
        """The same of a token."""
        return Features("hedgehog", (self.q_matrix, self.k_matrix))


class SquaredReLU(LayerMap):
    """``relu(d^(-1/4) W x + b)^2``, with ``W`` and ``b`` per head.

    The weight of a key can be zero, and a thousand such keys have no weight together.
    """

    q_matrix: nn.Parameter
    q_shift: nn.Parameter
    k_matrix: nn.Parameter
    k_shift: nn.Parameter

    def __init__(self, heads: int, kv_heads: int, width: int, options: LayerOptions) -> None:
        super().__init__(heads, kv_heads, width, options)
        count = SquaredReLU.features(width, options)
        for name, number in (("q", heads), ("k", kv_heads)):
            self.register_parameter(
                f"{name}_matrix", nn.Parameter(torch.empty(number, count, width))
            )
            self.register_parameter(f"{name}_shift", nn.Parameter(torch.empty(number, count)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``W`` from a normal distribution of variance ``1 / d``, and set ``b`` to 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("shift"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    @staticmethod
    def features(width: int, options: LayerOptions) -> int:
        """``num_features``, by default twice the width."""
        return options.num_features or 2 * width

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The squares."""
        found = []
        for name, x in (("q", q), ("k", k)):
            matrix, shift = (
                getattr(self, f"{name}_{part}").to(x.dtype) for part in ("matrix", "shift")
            )
            batch, _, tokens, width = x.shape
            # One product for each head: of a token, each further operation would take as long.
            flat = x.transpose(0, 1).flatten(1, 2)
            y = torch.baddbmm(shift.unsqueeze(1), flat, matrix.mT, alpha=width**-0.25)
            found.append(y.relu().square().unflatten(1, (batch, tokens)).transpose(0, 1))
        return found[0], found[1]

    def in_cpp(self) -> Features:
        """The same of a token."""
        matrices, shifts = (self.q_matrix, self.k_matrix), (self.q_shift, self.k_shift)
        return Features("squared_relu", matrices, shifts, self.q_matrix.shape[2] ** -0.25)


class Rebased(LayerMap):
    """``gamma * layer_norm(x) + beta``, with ``gamma`` and ``beta`` per head and channel."""

    def __init__(self, heads: int, kv_heads: int, width: int, options: LayerOptions) -> None:
        super().__init__(heads, kv_heads, width, options)
        for name, count in (("q", heads), ("k", kv_heads)):
            self.register_parameter(f"{name}_scale", nn.Parameter(torch.empty(count, width)))
            self.register_parameter(f"{name}_shift", nn.Parameter(torch.empty(count, width)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set scales to 1 and shifts to 0."""
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, float(name.endswith("scale")))

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The affine maps."""
        found = []
        for name, x in (("q", q), ("k", k)):
            scale, shift = (
                getattr(self, f"{name}_{part}").to(x.dtype).unsqueeze(1)
                for part in ("scale", "shift")
            )
            found.append(scale * F.layer_norm(x, x.shape[-1:]) + shift)
        return found[0], found[1]


class RandomFeatures(LayerMap):
    """Projections to fixed Gaussian vectors, orthogonal in groups; a saved model contains them."""

    directions: Tensor

    def __init__(self, heads: int, kv_heads: int, width: int, options: LayerOptions) -> None:
        super().__init__(heads, kv_heads, width, options)
        count = RandomFeatures.features(width, options)
        self.register_buffer("directions", torch.empty(count, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors."""
        count, width = self.directions.shape
        groups = torch.randn(math.ceil(count / width), width, width)
        orthogonal = torch.linalg.qr(groups).Q.flatten(0, 1)[:count]
        lengths = torch.randn(count, width).norm(dim=-1, keepdim=True)
        with torch.no_grad():
            self.directions.copy_(lengths * orthogonal)

    @staticmethod
    def features(width: int, options: LayerOptions) -> int:
        """One per random vector."""
        return options.num_features or width


class Performer(RandomFeatures):
    """``exp(omega x - |x|^2 / 2) / sqrt(m)`` of ``x = q d^(-1/4)``: on average ``exp(s)``."""

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positive random features."""
        count, width = self.directions.shape
        found = []
        for x in (q, k):
            x = x * width**-0.25
            exponent = x @ self.directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2
            found.append(exponent.exp() / math.sqrt(count))
        return found[0], found[1]


class RandomFourier(RandomFeatures):
    """``[sin(omega x), cos(omega x)] / sqrt(m)`` of unit vectors (random feature attention)."""

    @staticmethod
    def features(width: int, options: LayerOptions) -> int:
        """A sine and a cosine per random vector."""
        return 2 * RandomFeatures.features(width, options)

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Sines and cosines."""
        found = []
        for x in (q, k):
            angle = FEATURE_MAPS["cosine"](x) @ self.directions.to(x.dtype).mT
            features = torch.cat((angle.sin(), angle.cos()), dim=-1)
            found.append(features / math.sqrt(len(self.directions)))
        return found[0], found[1]


class CosFormer(LayerMap):
    """``relu(x) [cos a_t, sin a_t]`` with ``a_t = pi t / 2M``.

    The score is ``relu(q_t) . relu(k_s) cos(a_t - a_s)``.
    """

    def __init__(self, heads: int, kv_heads: int, width: int, options: LayerOptions) -> None:
        super().__init__(heads, kv_heads, width, options)
        self.length = options.cosine_length

    @staticmethod
    def features(width: int, options: LayerOptions) -> int:
        """A cosine and a sine per channel."""
        return 2 * width

    def mapped(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The turned channels."""
        angle = positions.to(q.dtype)[:, None, :, None] * (math.pi / (2 * self.length))
        turned = (
            torch.cat((x.relu() * angle.cos(), x.relu() * angle.sin()), dim=-1) for x in (q, k)
        )
        return next(turned), next(turned)


LAYER_MAPS: dict[str, type[LayerMap]] = {
    "none": LayerMap,
    "cosine": Cosine,
    "hedgehog": Hedgehog,
    "squared_relu": SquaredReLU,
    "rebased": Rebased,
    "performer": Performer,
    "rfa": RandomFourier,
    "cosformer": CosFormer,
}


def key_widths(spec: AttentionSpec, options: LayerOptions, head_dim: int) -> tuple[int, int | None]:
    """The width of the keys that the operation sees; that of its ``outside_k``, if it has them."""
    width = options.qk_dim or head_dim
    mapped = LAYER_MAPS[options.feature_map].features(width, options)
    if spec.outside == "hidden" or options.feature_map == "none":
        return mapped, None
    return width, mapped
