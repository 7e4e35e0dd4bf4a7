"""What an attention layer has besides projections: maps, decays, gates, parameters of a spec."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softmax_rnn.ops.attention import attention
from softmax_rnn.ops.context_parallel import context_parallel_attention
from softmax_rnn.ops.forms.row_sums import compute_dtype
from softmax_rnn.ops.forms.token import Inverse, after_another, like_the_last
from softmax_rnn.ops.inputs import is_per_key
from softmax_rnn.ops.layer.decays import LayerDecay, decay_of
from softmax_rnn.ops.layer.maps import LAYER_MAPS, LayerMap, key_widths
from softmax_rnn.ops.layer.parts import LayerPart, last_inputs
from softmax_rnn.ops.norms import normalized
from softmax_rnn.ops.options import LayerOptions
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State
from softmax_rnn.ops.variants import resolve_layer

ACTIVATIONS = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "swish": nn.functional.silu,
    "softplus": nn.functional.softplus,
}


class Projected(NamedTuple):
    """What the operation takes of some tokens.

    Attributes:
        q: queries [B, H, T, D], after positions and feature map (with ``outside="series"``, before
            the feature map).
        k: keys [B, Hkv, T, D], likewise.
        v: values [B, Hkv, T, E], after the input gate.
        log_decay: [Hkv], [B, Hkv, T], [B, Hkv, T, D] or ``None``.
        ungated: values before the input gate.
        inputs: those of a short convolution of width W, [B, W - 1 + T, channels]: of these tokens
            and of the last ones before them.
        outside_q: with ``outside="series"`` and a feature map, the mapped queries [B, H, T, F].
        outside_k: the mapped keys [B, Hkv, T, F], likewise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    ungated: Tensor
    inputs: Tensor | None
    outside_q: Tensor | None = None
    outside_k: Tensor | None = None

    def first(self, tokens: int) -> Projected:
        """The same of the first tokens alone."""
        removed = self.q.shape[2] - tokens

        def cut(name: str, x: Any) -> Any:
            if x is None or x.ndim == 1:  # decays per head
                return x
            return x[:, : x.shape[1] - removed] if name == "inputs" else x[:, :, :tokens]

        return Projected(**{name: cut(name, x) for name, x in self._asdict().items()})


class Mapped(NamedTuple):
    """Queries and keys as in :class:`Projected`."""

    q: Tensor
    k: Tensor
    outside_q: Tensor | None
    outside_k: Tensor | None


class AttentionCore(LayerPart):
    """The parts of an attention layer that do not depend on how it projects tokens.

    :class:`softmax_rnn.Attention` has its own projections, a converted model those of its family.

    - ``length_logit`` [H]: a learned length power is its sigmoid.
    - ``norm_weight``, ``norm_bias`` [head_dim]: of RMS and layer norms, shared by the heads.
    - ``coefficient_logit`` [H, N + 1]: learned coefficients are ``exp(logit) / n!``.
    - ``sink``, ``outside_logit`` [H]: the sink, and the logarithm of the outside scale.
    - ``temperature_logit`` [H], ``skip_weight`` [H] or [H, head_dim], ``merged_norm_weight``
      [H * head_dim]: of the options ``temperature``, ``skip`` and ``merged_norm``.

    Args:
        spec: an :class:`AttentionSpec` or a variant's name, which means its options as well.
        options: :class:`LayerOptions`, or a mapping of some of its fields in place of those of the
            variant; by default the variant's.

    Raises:
        ValueError: for an unknown variant or option, or options that do not fit the spec.
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
    feature_map: LayerMap | None
    decay: LayerDecay | None
    input_gate: nn.Linear | None
    output_gate: nn.Linear | None
    # The processes that share each sequence, in a block of positions each; None for this one alone.
    context_group: Any = None
    # Of mapped queries outside a window, beside the scale of scores.
    far_factor: float = 1.0

    def __init__(
        self,
        spec: AttentionSpec | str,
        options: LayerOptions | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.options = resolve_layer(spec, options)
        self._check_options()
        # What `attend` computes. The input gate was applied before; a skip comes before the output
        # gate.
        after = "none" if self.options.skip else self.spec.output_gate
        self.operation = dataclasses.replace(self.spec, input_gate=False, output_gate=after)

    def add_parts(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, qk_dim: int, head_dim: int
    ) -> None:
        """Create what the spec and options need.

        Args:
            hidden_size: width of the hidden states, from which gates and decays are computed.
            num_heads: query heads.
            num_kv_heads: key/value heads.
            qk_dim: width of queries and keys before the feature map.
            head_dim: width of values.
        """
        self.head_dim = head_dim
        layer_map = LAYER_MAPS[self.options.feature_map]
        mapped = self.options.feature_map != "none"
        self.feature_map = (
            layer_map(num_heads, num_kv_heads, qk_dim, self.options) if mapped else None
        )
        decay = decay_of(self.spec, self.options)
        key_size, outside_size = key_widths(self.spec, self.options, qk_dim)
        if self.spec.decay == "channel" and outside_size not in (None, key_size):
            raise ValueError(
                f"decay='channel' has one decay per channel, but feature_map="
                f"{self.options.feature_map!r} makes keys of width {outside_size} outside the "
                f"window, of width {key_size} inside."
            )
        self.decay = decay(hidden_size, num_kv_heads, key_size) if decay else None
        own_gate = self.spec.input_gate and self.options.decay_rule != "time_step"
        self.input_gate = nn.Linear(hidden_size, num_kv_heads) if own_gate else None
        gated = self.spec.output_gate != "none"
        gates = num_heads * head_dim if self.options.gate_per_channel else num_heads
        self.output_gate = nn.Linear(hidden_size, gates) if gated else None
        own = self._own_parameters(num_heads)
        for name, (used, shape, _) in own.items():
            # None is an ordinary attribute: PyTorch looks up its own ones ten times as long.
            setattr(self, name, nn.Parameter(torch.empty(shape)) if used else None)
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
        terms, per_channel = 1 + (spec.order or 0), options.skip_per_channel
        return {
            "length_logit": (spec.denominator == "learned_length", (heads,), 0.5),
            "norm_weight": (weighted, (width,), 1.0),
            "norm_bias": (weighted and spec.norm == "layer", (width,), 0.0),
            "coefficient_logit": (spec.learned_coefficients, (heads, terms), 0.0),
            "sink": (spec.denominator == "sum_plus_sink", (heads,), 0.0),
            "outside_logit": (spec.outside == "series", (heads,), 0.0),
            "temperature_logit": (options.temperature, (heads,), 0.0),
            "skip_weight": (options.skip, (heads, width) if per_channel else (heads,), 1.0),
            "merged_norm_weight": (options.merged_norm, (heads * width,), 1.0),
        }

    def reset_parameters(self) -> None:
        """Initialise the parameters that belong to no submodule, for example norm weights to 1."""
        for name, (_, _, value) in self._own_parameters(1).items():
            parameter = getattr(self, name)
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def map_features(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor | None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> Mapped:
        """Feature map and temperature of queries and keys at ``positions`` [B or 1, T].

        ``unrotated``: queries and keys before rotary positions, where the options map those.
        """
        outside_q = outside_k = None
        if self.feature_map is not None:
            assert positions is not None
            mapped = self.feature_map(*(unrotated or (q, k)), positions)
            if self.spec.outside == "series":
                outside_q, outside_k = mapped
            else:
                q, k = mapped
        if self.temperature_logit is not None:
            temperature = self.temperature_logit.exp().to(q.dtype)[:, None, None]
            q = q * temperature
            outside_q = None if outside_q is None else outside_q * temperature
        return Mapped(q, k, outside_q, outside_k)

    def decay_and_gate(
        self, hidden_states: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Log decays and the gate of values [B, Hkv, T], as precise as in a cache of ``dtype``."""
        log_decay = gate = None
        if self.decay is not None:
            log_decay, gate = self.decay(hidden_states)
            # As precise as it is in a cache, beside the keys.
            log_decay = log_decay if log_decay.ndim == 1 else log_decay.to(dtype)
        if self.input_gate is not None:
            activation = ACTIVATIONS[self.options.input_activation]
            gate = activation(self.input_gate(hidden_states)).transpose(1, 2)
        return log_decay, None if gate is None or not self.spec.input_gate else gate.to(dtype)

    def attend(self, hidden_states: Tensor, projected: Projected, **options: Any) -> Any:
        """:func:`softmax_rnn.attention` of projected tokens, with this layer's parameters.

        ``options`` are further arguments, also in place of the layer's own, such as its sink. Keys,
        values and decays may be those of earlier tokens as well, from a cache.
        """
        mask = options.get("mask")
        if mask is not None and is_per_key(mask):
            options["padding"] = True
        gate, skip, outside = self._gate(hidden_states), self.skip_weight, self.outside_logit
        own: dict[str, Any] = {
            "log_decay": projected.log_decay,
            "output_gate": gate if skip is None else None,
            "length_power": None if self.length_logit is None else self.length_logit.sigmoid(),
            "coefficients": self._coefficients(),
            "sink": self.sink,
            "outside_scale": None if outside is None else outside.exp(),
            "outside_q": projected.outside_q,
            "outside_k": projected.outside_k,
            "norm_weight": self.norm_weight,
            "norm_bias": self.norm_bias,
        }
        compute: Any = attention
        if self.context_group is not None:
            compute = functools.partial(context_parallel_attention, group=self.context_group)
        result = compute(*projected[:3], self.operation, **{**own, **options})
        out, state = result if options.get("return_state") else (result, None)
        if skip is not None:
            v = projected.ungated.repeat_interleave(out.shape[1] // projected.ungated.shape[1], 1)
            factor = skip if skip.ndim == 2 else skip.unsqueeze(-1)  # [H, 1 or E]
            out = out + factor.to(v.dtype).unsqueeze(1) * v
            if gate is not None:
                out = out * (gate if gate.ndim == 4 else gate.unsqueeze(-1)).to(out.dtype)
        if state is None:
            return out
        inputs = projected.inputs
        if inputs is not None:
            shown = None if mask is None else mask[(None,) * (4 - mask.ndim)][:, 0, 0]
            inputs = last_inputs(inputs, shown, projected.q.shape[2])
            state = dataclasses.replace(state, inputs=inputs)
        return out, state

    def next_token(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State | None,
        inverse: Callable[[], Inverse] | None,
    ) -> tuple[Tensor, State] | None:
        """A token after ``state``, at once: its output [B, H, 1, E] and the state after it.

        The features of a window's far keys are made in C++. ``None`` where :meth:`attend` has to
        compute them: of the first token, with gradients, where the layer has other parts.

        Args:
            q: the query [B, H, 1, D] inside the window; likewise the key and the value.
            k: [B, Hkv, 1, D].
            v: [B, Hkv, 1, E].
            state: of the tokens before it.
            inverse: finds what takes off the rotation of q and k (:class:`Features`); ``None`` if
                the features are those of rotated ones.
        """
        if state is None or state.spec is not self.operation or not self._is_plain:
            return None
        alike = like_the_last(q, k, v, state)
        if alike is None:
            return None
        features = None
        if self.feature_map is not None:
            features = self.feature_map.in_cpp()
            if features is None or not features.suit(q.dtype):
                return None
            given = None if inverse is None else inverse()
            features = features._replace(factor=self.far_factor, inverse=given)
        outside = self.outside_logit
        scale = None if outside is None else outside.exp()
        return after_another(alike, q, k, v, state, features, scale)

    @property
    def _is_plain(self) -> bool:
        """Whether nothing comes before the operation but a feature map, and nothing after it."""
        own = self.temperature_logit, self.skip_weight, self.sink, self.merged_norm_weight
        for each in (*own, self.input_gate, self.decay, self.context_group):
            if each is not None:
                return False
        return self.spec.outside == "series"

    def _gate(self, hidden_states: Tensor) -> Tensor | None:
        """The output gate, [B, H, T] or per channel [B, H, T, head_dim]."""
        if self.output_gate is None:
            return None
        gate: Tensor = ACTIVATIONS[self.options.gate_activation](self.output_gate(hidden_states))
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

    def join(self, out: Tensor) -> Tensor:
        """The heads' outputs [B, H, T, D] side by side, [B, T, H * D], after the merged norm."""
        out = out.transpose(1, 2).flatten(2)
        if self.merged_norm_weight is not None:
            out = normalized(out, None, "rms", self.merged_norm_weight, None)
        return out

    def extra_repr(self) -> str:
        """The spec and the options, in ``print(model)``."""
        plain = self.options == LayerOptions()
        return str(self.spec) if plain else f"{self.spec}, {self.options}"
