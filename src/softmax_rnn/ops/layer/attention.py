"""The attention layer: projections, positions, decays, gates and norms around ``attention()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from softmax_rnn.ops.layer.core import ACTIVATIONS, AttentionCore, Projected
from softmax_rnn.ops.layer.parts import ShortConvolution
from softmax_rnn.ops.options import LayerOptions
from softmax_rnn.ops.segments import check_segments, segments_of
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State


class Attention(AttentionCore):
    """Multi-head causal attention of any spec, with Llama's parameter names plus the spec's own.

    It is always causal; :func:`softmax_rnn.attention` takes ``causal=False``.

    A gate is one sigmoid scalar per head and token, ``sigmoid(Linear(hidden_size -> heads))``
    (appendix E), unless the options say otherwise. Of other parameters, a layer has those that its
    spec and options need (see :class:`AttentionCore`); softmax needs none.

    Rotary positions are an argument of each call; without them, a layer has none.

    Args:
        hidden_size: width of the residual stream.
        num_heads: query heads.
        spec: an :class:`AttentionSpec` or a variant's name, which means its options as well.
        num_kv_heads: key/value heads; by default ``num_heads``.
        head_dim: width of a head; by default ``hidden_size // num_heads``.
        bias: whether the four projections have a bias.
        options: :class:`LayerOptions`, or a mapping of some of its fields in place of those of the
            variant; by default the variant's.

    Raises:
        ValueError: for invalid sizes, an unknown variant or option, or options that do not fit the
            spec.

    Example:
        >>> layer = Attention(256, 4, "taylor:2+decay", options={"qk_dim": 16})
        >>> layer(torch.randn(2, 100, 256)).shape
        torch.Size([2, 100, 256])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        spec: AttentionSpec | str = "softmax",
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        options: LayerOptions | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, options)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        sizes |= {} if head_dim is None else {"head_dim": head_dim}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {size!r}.")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"The {num_kv_heads} key/value heads must divide the {num_heads} query heads."
            )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"The {num_heads} heads must divide the hidden size {hidden_size}.")
        head_dim = head_dim or hidden_size // num_heads
        self.hidden_size = hidden_size
        self.qk_dim = self.options.qk_dim or head_dim
        queries, keys = num_heads * self.qk_dim, num_kv_heads * self.qk_dim
        values, outputs = num_kv_heads * head_dim, num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(hidden_size, values, bias=bias)
        self.o_proj = nn.Linear(outputs, hidden_size, bias=bias)
        width = self.options.short_convolution
        channels, biased = queries + keys + values, self.options.convolution_bias
        self.short_convolution = ShortConvolution(channels, width, biased) if width else None
        self.add_parts(hidden_size, num_heads, num_kv_heads, self.qk_dim, head_dim)

    def project(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        state: State | None = None,
    ) -> Projected:
        """What the operation takes of hidden states [B, T, hidden_size].

        Input gate and feature map are applied here, so that a cache holds gated values and mapped
        keys.

        Args:
            hidden_states: [B, T, hidden_size].
            position_embeddings: the rotary cosines and sines, each [B or 1, T, head_dim].
            positions: the tokens' positions [B or 1, T]; by default, they follow the state's.
            mask: visible keys (True), broadcast to [B, H, T, T]; a short convolution needs
                [B, 1, 1, T].
            state: the state of the earlier tokens.
        """
        tokens = hidden_states.shape[1]
        flat = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        inputs = None
        if self.short_convolution is not None:
            x, shown = torch.cat(flat, -1), _shown(mask)
            earlier = None if state is None else state.inputs
            if self.context_group is not None:
                earlier = self.short_convolution.before(x, shown, self.context_group)
            x, inputs = self.short_convolution(x, shown, earlier)
            x = ACTIVATIONS[self.options.convolution_activation](x)
            flat = list(x.split([part.shape[-1] for part in flat], -1))
        q, k, v = flat
        v = _by_head(v, self.head_dim)
        rotary = position_embeddings if self.options.rotary else None
        unrotated = None
        if rotary is not None and tokens == 1 and not self.options.map_before_rotary:
            # When decoding, call overhead dominates: rotate queries and keys in one call.
            both = rotate(_by_head(torch.cat((q, k), -1), self.qk_dim), *rotary)
            q, k = both.split((q.shape[2] // self.qk_dim, k.shape[2] // self.qk_dim), 1)
        else:
            q, k = _by_head(q, self.qk_dim), _by_head(k, self.qk_dim)
            unrotated = (q, k) if self.options.map_before_rotary else None
            if rotary is not None:
                q, k = rotate(q, *rotary), rotate(k, *rotary)
        if q.dtype != v.dtype:  # autocast leaves the rotation in float32
            q, k = q.to(v.dtype), k.to(v.dtype)
        if positions is None and self.feature_map is not None:
            positions = torch.arange(tokens, device=q.device).unsqueeze(0)
            positions = positions + (0 if state is None else state.tokens)
        q, k, *outside = self.map_features(q, k, positions, unrotated)
        log_decay, gate = self.decay_and_gate(hidden_states, k.dtype)
        gated = v if gate is None else v * gate.unsqueeze(-1)
        return Projected(q, k, gated, log_decay, v, inputs, *outside)

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        segments: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Any:
        """Attend causally.

        Args:
            hidden_states: [B, T, hidden_size].
            mask: visible keys (True), broadcast to [B, H, T, T]; a mask of tokens [B, T] is given
                as ``mask[:, None, None]``.
            position_embeddings: the rotary cosines and sines, each [B or 1, T, head_dim].
            segments: integers [B or 1, T], for several sequences in a row; each is computed alone.
            state: the state of the earlier tokens, for a finite series.
            return_state: whether to return the state after these tokens as well.

        Returns:
            The output [B, T, hidden_size]; with ``return_state`` a pair of the output and the
            :class:`State`.

        Raises:
            ValueError: for inputs of another shape, or a mask that a short convolution cannot
                apply to tokens.
        """
        self._check(hidden_states, position_embeddings)
        if segments is not None:
            stateful = state is not None or return_state
            check_segments(segments, hidden_states, stateful)
            divided = segments_of(segments, len(hidden_states))
            parts = zip(
                divided.split(hidden_states, 1),
                divided.split_mask(mask, causal=True),
                divided.split_all(position_embeddings, 1),
                strict=True,
            )
            each = [self.forward(x, shown, position_embeddings=at) for x, shown, at in parts]
            return divided.join(each, 1)
        projected = self.project(hidden_states, position_embeddings, mask=mask, state=state)
        options = {"mask": mask, "state": state, "return_state": return_state}
        result = self.attend(hidden_states, projected, **options)
        return (self.merge(result[0]), result[1]) if return_state else self.merge(result)

    def _check(self, x: Any, position_embeddings: Any) -> None:
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.hidden_size:
            given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"hidden_states must be [B, T, {self.hidden_size}], not {given}.")
        if position_embeddings is None or not self.options.rotary:
            return
        pair = position_embeddings
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            kind = f"{len(pair)} of a {type(pair).__name__}" if hasattr(pair, "__len__") else pair
            raise ValueError(f"position_embeddings must be a pair, cosines and sines, not {kind}.")
        for name, angles in zip(("cosines", "sines"), pair, strict=True):
            shape = list(angles.shape) if isinstance(angles, Tensor) else type(angles).__name__
            if (
                not isinstance(angles, Tensor)
                or angles.ndim != 3
                or angles.shape != pair[0].shape
                or angles.shape[1] != x.shape[1]
                or angles.shape[0] not in (1, x.shape[0])
            ):
                raise ValueError(
                    f"The {name} of position_embeddings must be [{x.shape[0]} or 1, {x.shape[1]}, "
                    f"head_dim], both of one shape, not {shape}."
                )

    def merge(self, out: Tensor) -> Tensor:
        """Project the heads' outputs [B, H, T, D] to [B, T, hidden_size]."""
        return self.o_proj(self.join(out))


def _shown(mask: Tensor | None) -> Tensor | None:
    """Which tokens a mask [B or 1, 1, 1, T] shows, [B or 1, T]."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    if not mask.shape[1] == mask.shape[2] == 1:
        raise ValueError(
            "A short convolution sees tokens, not pairs of them: the mask must be broadcastable to "
            f"[B, 1, 1, T], not {list(mask.shape)}. Give one of [B, T] as mask[:, None, None]."
        )
    return mask[:, 0, 0]


def _by_head(x: Tensor, width: int) -> Tensor:
    """[B, T, H * width] as [B, H, T, width]."""
    batch, tokens, channels = x.shape
    if tokens == 1:
        return x.view(batch, channels // width, 1, width)
    return x.view(batch, tokens, channels // width, width).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: rotate x [B, H, T, D] by angles, given as cosines and sines [B, T, R].

    If x is narrower than R, it takes evenly spaced ones of the frequencies: they are those of a
    rotary embedding of width D if D divides R. If x is wider, or D is odd, the last channels stay.
    """
    width, full = x.shape[-1], cos.shape[-1]
    turning = min(width, full) // 2 * 2
    if turning < full:
        half = torch.arange(turning // 2, device=cos.device) * full // turning
        chosen = torch.cat((half, half + full // 2))
        cos, sin = cos[..., chosen], sin[..., chosen]
    rest = None
    if turning < width:
        x, rest = x[..., :turning], x[..., turning:]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    x = x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    return x if rest is None else torch.cat((x, rest), dim=-1)
