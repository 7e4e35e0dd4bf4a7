"""A converted attention module as plain data, in the configuration of its model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from softmax_rnn._utils.errors import shown, unknown
from softmax_rnn.conversion.rotations import NO_POSITIONS, ROTATIONS
from softmax_rnn.ops import INVERSE_SQRT, AttentionSpec, Denominator, LayerOptions

_FAMILY_OPTIONS: dict[str, Any] = {"qk_dim": None, "rotary": True, "short_convolution": 0}


@dataclass(frozen=True)
class ConvertedAttention:
    """One attention module of a converted model, as plain data.

    Attributes:
        module: its name in the base model (``layers.0.self_attn``).
        index: the layer's place in a cache.
        attention: the spec's fields. Without a scale of its own it has the family's.
        layer_options: the fields of :class:`softmax_rnn.LayerOptions`.
        hidden_size: width of the module's input.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        key_width: width of queries and keys.
        value_width: width of values.
        scaling: the family's factor of the scores.
        causal: whether a query sees no later key.
        sliding_window: the family's window, applied by its masks; ``None`` without one.
        sinks: whether the family has attention sinks, learned per head.
        rotation: how the family rotates queries and keys, a key of ``ROTATIONS`` (rotations.py);
            known where the layer's feature map is before rotary positions (``map_before_rotary``).
    """

    module: str
    index: int
    attention: dict[str, Any]
    layer_options: dict[str, Any]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scaling: float
    causal: bool = True
    sliding_window: int | None = None
    sinks: bool = False
    rotation: str = NO_POSITIONS

    @property
    def options(self) -> LayerOptions:
        """``layer_options`` as :class:`softmax_rnn.LayerOptions`."""
        return LayerOptions.from_dict(self.layer_options)

    @property
    def spec(self) -> AttentionSpec:
        """The spec with the family's scale and sinks."""
        spec = AttentionSpec.from_dict(self.attention)
        scale = self.scaling if self.scaled_by_family else spec.scale
        denominator = spec.denominator
        if self.sinks and denominator == "sum":
            denominator = "sum_plus_sink"
        return dataclasses.replace(spec, scale=scale, denominator=denominator)

    @property
    def source_spec(self) -> AttentionSpec:
        """The source's own attention, softmax."""
        sinks: Denominator = "sum_plus_sink" if self.sinks else "sum"
        return AttentionSpec(scale=self.scaling, denominator=sinks)

    @property
    def scaled_by_family(self) -> bool:
        """Whether scores are scaled by the family's number, in place of ``"1/sqrt(d)"``."""
        spec = AttentionSpec.from_dict(self.attention)
        return spec.scale == INVERSE_SQRT or (spec.scale is None and spec.feature_map == "identity")

    def check(self) -> None:
        """Raise ``ValueError`` for an attention that the family's module cannot have."""
        spec, options = self.spec, self.options
        if self.rotation not in ROTATIONS:
            raise unknown("rotation of a converted layer", self.rotation, ROTATIONS)
        for name, value in _FAMILY_OPTIONS.items():
            if (found := getattr(options, name)) != value:
                raise ValueError(
                    f"{name}={found!r} would change the family's own projections or positions, "
                    f"which a conversion keeps: give layer_options={{{name!r}: {value!r}}}."
                )
        if self.sinks and spec.denominator != "sum_plus_sink":
            raise ValueError(
                f"{self.module} has attention sinks, part of a row sum: the denominator must be "
                f"'sum' or 'sum_plus_sink', not {spec.denominator!r}."
            )
        if self.sliding_window and spec.global_keys:
            raise ValueError(
                f"{self.module} has a sliding window of its own, which hides the first keys; the "
                f"spec has global_keys={spec.global_keys}."
            )

    @classmethod
    def from_dict(cls, data: object) -> ConvertedAttention:
        """The layer of a saved configuration; raises ``ValueError`` for anything else."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if not isinstance(data, Mapping):
            raise ValueError(f"A converted layer must be a mapping, not {shown(data)}.")
        for key in data:
            if key not in fields:
                raise unknown("field of a converted layer", key, fields)
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING
            if required and name not in data:
                raise ValueError(f"A converted layer needs {name}; found: {', '.join(data)}.")
            if name in data and not _fits(str(field.type), data[name], int(name != "index")):
                raise ValueError(f"{name} of a converted layer cannot be {shown(data[name])}.")
        return cls(**data)


def _fits(kind: str, value: object, low: int) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "float":
        return isinstance(value, float) and math.isfinite(value) and value != 0
    if kind.startswith("int"):
        if value is None:
            return kind == "int | None"
        return isinstance(value, int) and not isinstance(value, bool) and value >= low
    return isinstance(value, str if kind == "str" else dict)
