"""The attention layer: projections, positions, decays, gates and norms around ``attention()``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softmax_rnn.ops.forms.row_sums import compute_dtype
from softmax_rnn.ops.layer_decays import decay_of
from softmax_rnn.ops.layer_maps import LAYER_MAPS, key_width
from softmax_rnn.ops.layer_options import LayerOptions
from softmax_rnn.ops.layer_parts import LayerPart, ShortConvolution
from softmax_rnn.ops.norms import normalized
from softmax_rnn.ops.operation import attention
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State
from softmax_rnn.ops.variants import resolve_layer

_ACTIVATIONS = {"none": lambda x: x, "sigmoid": torch.sigmoid, "swish": nn.functional.silu}


class Projected(NamedTuple):
    """What the operation takes of some tokens.

    Attributes:
        q: queries [B, H, T, D], after positions and feature map.
        k: keys [B, Hkv, T, D], likewise.
        v: values [B, Hkv, T, E], after the input gate.
        log_decay: [Hkv], [B, Hkv, T], [B, Hkv, T, D] or ``None``.
        ungated: values before the input gate.
        inputs: the last inputs of a short convolution, for the next tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    ungated: Tensor
    inputs: Tensor | None


class Attention(LayerPart):
    """Multi-head attention of any spec, with Llama's parameter names plus the spec's own.

    A gate is one sigmoid scalar per head and token, ``sigmoid(Linear(hidden_size -> heads))``
    (appendix E), unless the options say otherwise. Of other parameters, a layer has those that its
    spec and options need; softmax needs none:

    - ``length_logit`` [H]: a learned length power is its sigmoid.
    - ``norm_weight``, ``norm_bias`` [head_dim]: of RMS and layer norms, shared by the heads.
    - ``coefficient_logit`` [H, N + 1]: learned coefficients are ``exp(logit) / n!``.
    - ``sink``, ``outside_logit`` [H]: the sink, and the logarithm of the outside scale.
    - ``temperature_logit``, ``skip_weight`` [H], ``merged_norm_weight`` [H * head_dim]: of the
      options ``temperature``, ``skip`` and ``merged_norm``.

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

    length_logit: nn.Parameter | None
    norm_weight: nn.Parameter | None
    norm_bias: nn.Parameter | None
    coefficient_logit: nn.Parameter | None
    sink: nn.Parameter | None
    outside_logit: nn.Parameter | None
    temperature_logit: nn.Parameter | None
    skip_weight: nn.Parameter | None
    merged_norm_weight: nn.Parameter | None

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
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}.")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"The {num_kv_heads} key/value heads must divide the {num_heads} query heads."
            )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"The {num_heads} heads must divide the hidden size {hidden_size}.")
        self.spec, self.options = resolve_layer(spec, options)
        self._check_options()
        self.head_dim = head_dim or hidden_size // num_heads
        self.qk_dim = self.options.qk_dim or self.head_dim
        queries, keys = num_heads * self.qk_dim, num_kv_heads * self.qk_dim
        values, outputs = num_kv_heads * self.head_dim, num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(hidden_size, values, bias=bias)
        self.o_proj = nn.Linear(outputs, hidden_size, bias=bias)
        width = self.options.short_convolution
        self.short_convolution = ShortConvolution(queries + keys + values, width) if width else None
        mapped = self.options.feature_map != "none"
        layer_map = LAYER_MAPS[self.options.feature_map]
        heads = num_heads, num_kv_heads
        self.feature_map = layer_map(*heads, self.qk_dim, self.options) if mapped else None
        decay = decay_of(self.spec, self.options)
        key_size = key_width(self.options, self.head_dim)
        self.decay = decay(hidden_size, num_kv_heads, key_size) if decay else None
        own_gate = self.spec.input_gate and self.options.decay_rule != "time_step"
        self.input_gate = nn.Linear(hidden_size, num_kv_heads) if own_gate else None
        gated = self.spec.output_gate != "none"
        gates = outputs if self.options.gate_per_channel else num_heads
        self.output_gate = nn.Linear(hidden_size, gates) if gated else None
        for name, (used, shape, _) in self._own_parameters(num_heads).items():
            parameter = nn.Parameter(torch.empty(shape)) if used else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def _check_options(self) -> None:
        if self.options.skip and self.spec.output_gate == "before_norm":
            raise ValueError(
                "skip=True adds values to the output after the norm, and before an output gate: "
                "it needs output_gate='after_norm' or 'none', not 'before_norm'."
            )

    def _own_parameters(self, heads: int) -> dict[str, tuple[bool, tuple[int, ...], float]]:
        """Of each parameter: whether it is needed, its shape, its initial value."""
        spec, options, width = self.spec, self.options, self.head_dim
        weighted = spec.norm in ("rms", "layer") and options.norm_weight
        terms = 1 + (spec.order or 0)
        return {
            "length_logit": (spec.denominator == "learned_length", (heads,), 0.5),
            "norm_weight": (weighted, (width,), 1.0),
            "norm_bias": (weighted and spec.norm == "layer", (width,), 0.0),
            "coefficient_logit": (spec.learned_coefficients, (heads, terms), 0.0),
            "sink": (spec.denominator == "sum_plus_sink", (heads,), 0.0),
            "outside_logit": (spec.outside == "series", (heads,), 0.0),
            "temperature_logit": (options.temperature, (heads,), 0.0),
            "skip_weight": (options.skip, (heads,), 1.0),
            "merged_norm_weight": (options.merged_norm, (heads * width,), 1.0),
        }

    def reset_parameters(self) -> None:
        """Initialise the parameters that are no part's, for example norm weights to 1."""
        for name, (_, _, value) in self._own_parameters(1).items():
            parameter = getattr(self, name)
            if parameter is not None:
                nn.init.constant_(parameter, value)

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
            earlier = None if state is None else state.inputs
            x, inputs = self.short_convolution(torch.cat(flat, -1), _shown(mask), earlier)
            x = _ACTIVATIONS[self.options.convolution_activation](x)
            flat = list(x.split([part.shape[-1] for part in flat], -1))
        widths = self.qk_dim, self.qk_dim, self.head_dim
        q, k, v = (
            x.unflatten(-1, (-1, width)).transpose(1, 2)
            for x, width in zip(flat, widths, strict=True)
        )
        if position_embeddings is not None and self.options.rotary:
            # Autocast leaves the rotation in float32.
            q, k = (rotate(x, *position_embeddings).to(v.dtype) for x in (q, k))
        if self.feature_map is not None:
            if positions is None:
                positions = torch.arange(tokens, device=q.device).unsqueeze(0)
                positions = positions + (0 if state is None else state.tokens)
            q, k = self.feature_map(q, k, positions)
        if self.temperature_logit is not None:
            q = q * self.temperature_logit.exp().to(q.dtype)[:, None, None]
        log_decay = gate = None
        if self.decay is not None:
            log_decay, gate = self.decay(hidden_states)
            # As precise as it is in a cache, beside the keys.
            log_decay = log_decay if log_decay.ndim == 1 else log_decay.to(k.dtype)
        if self.input_gate is not None:
            gate = self.input_gate(hidden_states).sigmoid().transpose(1, 2)
        gated = v
        if gate is not None and self.spec.input_gate:
            gated = v * gate.unsqueeze(-1).to(v.dtype)
        return Projected(q, k, gated, log_decay, v, inputs)

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Any:
        """Attend causally.

        Args:
            hidden_states: [B, T, hidden_size].
            mask: visible keys (True), broadcast to [B, H, T, T].
            position_embeddings: the rotary cosines and sines, each [B or 1, T, head_dim].
            state: the state of the earlier tokens, for a finite series.
            return_state: whether to return the state after these tokens as well.

        Returns:
            The output [B, T, hidden_size]; with ``return_state`` a pair of the output and the
            :class:`State`.

        Raises:
            ValueError: for a mask that a short convolution cannot apply to tokens.
        """
        projected = self.project(hidden_states, position_embeddings, mask=mask, state=state)
        options = {"mask": mask, "state": state, "return_state": return_state}
        result = self.attend(hidden_states, projected, **options)
        return (self.merge(result[0]), result[1]) if return_state else self.merge(result)

    def attend(self, hidden_states: Tensor, projected: Projected, **options: Any) -> Any:
        """:func:`softmax_rnn.attention` of projected tokens, with this layer's parameters.

        Keys, values and decays may be those of earlier tokens as well, from a cache.
        """
        spec = dataclasses.replace(self.spec, input_gate=False)  # project() has applied it
        gate = self._gate(hidden_states)
        skip = self.skip_weight
        if skip is not None:  # the gate comes after it
            spec = dataclasses.replace(spec, output_gate="none")
        result = attention(
            *projected[:3],
            spec,
            output_gate=gate if skip is None else None,
            log_decay=projected.log_decay,
            length_power=None if self.length_logit is None else self.length_logit.sigmoid(),
            coefficients=self._coefficients(),
            sink=self.sink,
            outside_scale=None if self.outside_logit is None else self.outside_logit.exp(),
            norm_weight=self.norm_weight,
            norm_bias=self.norm_bias,
            **options,
        )
        out, state = result if options.get("return_state") else (result, None)
        if skip is not None:
            v = projected.ungated.repeat_interleave(out.shape[1] // projected.ungated.shape[1], 1)
            out = out + skip.to(v.dtype)[:, None, None] * v
            if gate is not None:
                out = out * (gate if gate.ndim == 4 else gate.unsqueeze(-1)).to(out.dtype)
        if state is None:
            return out
        return out, dataclasses.replace(state, inputs=projected.inputs)

    def _gate(self, hidden_states: Tensor) -> Tensor | None:
        """The output gate, [B, H, T] or per channel [B, H, T, head_dim]."""
        if self.output_gate is None:
            return None
        gate: Tensor = _ACTIVATIONS[self.options.gate_activation](self.output_gate(hidden_states))
        if self.options.gate_per_channel:
            gate = gate.unflatten(-1, (-1, self.head_dim))
        return gate.transpose(1, 2)

    def _coefficients(self) -> Tensor | None:
        """The learned coefficients of a polynomial: positive, at first those of exp's series."""
        logit = self.coefficient_logit
        if logit is None:
            return None
        powers = torch.arange(logit.shape[1], dtype=compute_dtype(logit.dtype), device=logit.device)
        return (logit - torch.lgamma(powers + 1)).exp()

    def merge(self, out: Tensor) -> Tensor:
        """Project the heads' outputs [B, H, T, D] to [B, T, hidden_size]."""
        out = out.transpose(1, 2).flatten(2)
        if self.merged_norm_weight is not None:
            out = normalized(out, None, "rms", self.merged_norm_weight, None)
        return self.o_proj(out)

    def extra_repr(self) -> str:
        """The spec and the options, in ``print(model)``."""
        plain = self.options == LayerOptions()
        return str(self.spec) if plain else f"{self.spec}, {self.options}"


def _shown(mask: Tensor | None) -> Tensor | None:
    """Which tokens a mask [B or 1, 1, 1, T] shows, [B or 1, T]."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    if not mask.shape[1] == mask.shape[2] == 1:
        raise ValueError(
            "A short convolution sees tokens, not pairs of them: the mask must be broadcastable to "
            f"[B, 1, 1, T], not {list(mask.shape)}."
        )
    return mask[:, 0, 0]


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
    x, rest = x[..., :turning], x[..., turning:]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    x = x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    return torch.cat((x, rest), dim=-1) if rest.shape[-1] else x
