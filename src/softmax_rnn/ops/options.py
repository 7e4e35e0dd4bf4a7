"""What an attention layer adds to the operation: validated data, as :class:`AttentionSpec` is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from softmax_rnn._utils.errors import require_choice, unknown

LayerFeatureMap = Literal[
    "none", "cosine", "hedgehog", "squared_relu", "rebased", "performer", "rfa", "cosformer"
]  # fmt: skip
DecayRule = Literal["standard", "time_step", "softplus"]
InputActivation = Literal["sigmoid", "softplus"]
GateActivation = Literal["sigmoid", "swish"]
ConvolutionActivation = Literal["none", "swish"]

_CHOICES = {
    "feature_map": get_args(LayerFeatureMap),
    "decay_rule": get_args(DecayRule),
    "input_activation": get_args(InputActivation),
    "gate_activation": get_args(GateActivation),
    "convolution_activation": get_args(ConvolutionActivation),
}
# What changes the queries, keys or values before the operation, or its output after it. Everything
# else is an argument of the operation (gates, decays, a norm's weight) or the caller's (positions).
_BESIDE = (
    *("feature_map", "qk_dim", "temperature", "short_convolution"),
    *("skip", "merged_norm"),
)
_FLAGS = (
    "rotary",
    "map_before_rotary",
    "temperature",
    "gate_per_channel",
    "norm_weight",
    "convolution_bias",
    "skip",
    "skip_per_channel",
    "merged_norm",
)


@dataclass(frozen=True)
class LayerOptions:
    """The parts of :class:`softmax_rnn.Attention` around the operation, each independent.

    ``docs/related-systems.md`` names the system that each part comes from.

    Attributes:
        qk_dim: width of queries and keys; ``None`` for the head dimension, which values have.
        rotary: whether rotary positions are applied to queries and keys. A decay shows the order
            of tokens, too, so a layer with a decay can do without them.
        feature_map: a map of queries and keys before the operation, with parameters of its own:
            ``none``; ``cosine`` (unit vectors); ``hedgehog`` (softmax of a learned projection and
            of its negative); ``squared_relu`` (squares of a learned affine map, where it is
            positive); ``rebased`` (layer norm, then a learned affine map); ``performer`` and
            ``rfa`` (fixed random features); ``cosformer`` (relu, turned by the position). With
            ``outside="series"`` it maps those of the series only: inside the window they stay.
        map_before_rotary: whether ``feature_map`` sees queries and keys before rotary positions.
            A map of rotated ones depends on absolute positions; features before them have none, so
            that with ``outside="series"`` all of the attention depends on distances alone.
        num_features: number of features of ``squared_relu``, ``None`` for twice the width of
            queries and keys; of random projections of ``performer`` and ``rfa``, ``None`` for that
            width.
        cosine_length: cosFormer's ``M``: the number of tokens after which a weight is zero.
        temperature: whether each head multiplies its queries by a learned positive number.
        short_convolution: number of tokens of a causal convolution of each channel of queries, keys
            and values, after the projection; 0 for none.
        convolution_bias: whether the convolution adds a learned bias to each channel.
        convolution_activation: what follows the convolution: ``none`` or ``swish``.
        decay_rule: how the decay is computed: ``standard`` (RetNet's fixed decays per head, the
            forget gate of the forgetting transformer per token, GLA's gate per channel),
            ``time_step`` (Mamba-2's, per token; with the spec's input gate, the time step is that
            gate as well), or ``softplus`` (2Mamba's, ``-softplus(W x)`` per token).
        input_activation: of the spec's input gate: ``sigmoid`` or ``softplus``.
        gate_activation: of the output gate: ``sigmoid`` or ``swish``.
        gate_per_channel: whether the output gate has a value per channel, or one per head.
        norm_weight: whether the spec's RMS or layer norm has a learned weight and bias.
        skip: whether ``D_h * v_t`` is added to the output, before an output gate, with ``D_h``
            learned per head.
        skip_per_channel: whether ``D_h`` has a value per channel.
        merged_norm: whether an RMS norm with a learned weight acts over all heads together, before
            the last projection.

    Raises:
        ValueError: for an invalid value; the message names the allowed values and the nearest
            match.
    """

    qk_dim: int | None = None
    rotary: bool = True
    feature_map: LayerFeatureMap = "none"
    map_before_rotary: bool = False
    num_features: int | None = None
    cosine_length: int = 2048
    temperature: bool = False
    short_convolution: int = 0
    convolution_bias: bool = False
    convolution_activation: ConvolutionActivation = "none"
    decay_rule: DecayRule = "standard"
    input_activation: InputActivation = "sigmoid"
    gate_activation: GateActivation = "sigmoid"
    gate_per_channel: bool = False
    norm_weight: bool = True
    skip: bool = False
    skip_per_channel: bool = False
    merged_norm: bool = False

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            require_choice(field, getattr(self, field), allowed)
        for field in _FLAGS:
            if not isinstance(value := getattr(self, field), bool):
                raise ValueError(f"{field} must be True or False, not {value!r}.")
        lowest = {"qk_dim": 1, "num_features": 1, "cosine_length": 1, "short_convolution": 0}
        for field, low in lowest.items():
            value = getattr(self, field)
            if value is None and field in ("qk_dim", "num_features"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{field} must be an integer >= {low}, not {value!r}.")

    @property
    def beside_operation(self) -> dict[str, Any]:
        """Those options without which :func:`softmax_rnn.attention` computes something else."""
        return {name: x for name in _BESIDE if (x := getattr(self, name)) != _DEFAULTS[name]}

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data; ``LayerOptions.from_dict`` is its inverse."""
        return dataclasses.asdict(self)

    def replaced(self, fields: Mapping[str, Any]) -> LayerOptions:
        """These options with some other values; raises ``ValueError`` on unknown fields."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"A layer's options must be a mapping, not {fields!r}.")
        names = [field.name for field in dataclasses.fields(self)]
        for key in fields:
            if key not in names:
                raise unknown("layer option", key, names)
        return dataclasses.replace(self, **fields)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerOptions:
        """Build options from a mapping of field names; raises ``ValueError`` on unknown ones."""
        return cls().replaced(data)


_DEFAULTS = LayerOptions().to_dict()
