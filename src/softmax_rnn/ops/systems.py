"""Systems of related work as rows of the same table: a spec, and what their layers add.

| name                | system                                                  |
|---------------------|---------------------------------------------------------|
| ``retnet``          | RetNet (Sun et al., 2023)                               |
| ``mamba2``          | Mamba-2, without its convolution (Dao and Gu, 2024)     |
| ``gla``             | gated linear attention (Yang et al., 2024)              |
| ``2mamba``          | 2Mamba (Mongaras and Larson, 2026); ``2mamba_e``: exp   |
| ``forgetting``      | the forgetting transformer (Lin et al., 2025)           |
| ``gated_attention`` | gated attention (Qiu et al., 2025)                      |
| ``attention_sink``  | the learned sinks of gpt-oss (2025)                     |
| ``power_retention`` | power attention (Manifest AI, 2025), of even powers     |
| ``based``           | Based's linear attention (Arora et al., 2024)           |
| ``rebased``         | ReBased (Aksenov et al., 2024)                          |
| ``taylorshift``     | TaylorShift (Nauen et al., 2024)                        |
| ``performer``       | Performer (Choromanski et al., 2021)                    |
| ``rfa``             | random feature attention (Peng et al., 2021)            |
| ``cosformer``       | cosFormer (Qin et al., 2022)                            |
| ``hedgehog``        | Hedgehog (Zhang et al., 2024)                           |
| ``window``          | Longformer's window (Beltagy et al., 2020)              |
| ``window_taylor``   | exp in the window, a Taylor series outside, one row sum |
| ``lolcats``         | LoLCATs: Hedgehog's maps outside (Zhang et al., 2024)   |
| ``window_state``    | first key and window, squared ReLUs outside             |
| ``taylor_norm``     | the paper's L2 norm on a Taylor series                  |
| ``polynomial``      | learned coefficients >= 0, under the L2 norm            |
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from softmax_rnn.ops.options import LayerOptions as Layer
from softmax_rnn.ops.spec import AttentionSpec as Spec


class Variant(NamedTuple):
    """What a name means: the operation's spec and the layer's options."""

    spec: Spec
    options: Layer = Layer()


_WINDOW = 64
_TAYLOR = Spec(series="taylor", order=2)
_SQUARE = Spec(series="power", order=2)

# RetNet's layer: no denominator, a norm of each head without a weight, a gate of each channel.
_RETENTION = Spec(
    series="power", order=1, denominator="none", norm="rms", output_gate="after_norm"
)  # fmt: skip
_RETENTION_LAYER = Layer(norm_weight=False, gate_activation="swish", gate_per_channel=True)

# The inner product of features of the layer's own. Where they are >= 0, relu changes nothing, and
# tells the operation that no sum can cross zero.
_FEATURES = Spec(series="power", order=1, scale=1.0)
_POSITIVE_FEATURES = replace(_FEATURES, feature_map="relu")

# 2Mamba's layer: the decay shows the order of tokens.
_SEQUEL_LAYER = Layer(
    rotary=False, decay_rule="softplus", short_convolution=2, convolution_bias=True
)  # fmt: skip

# The systems with `rotary=False` show the order of tokens by a decay or by cosFormer's map.
SYSTEMS: dict[str, Variant] = {
    # Linear attention that forgets.
    "retnet": Variant(replace(_RETENTION, decay="head"), _RETENTION_LAYER),
    "mamba2": Variant(
        replace(_RETENTION, decay="token", scale=1.0, norm="none", input_gate=True),
        replace(
            _RETENTION_LAYER, rotary=False, decay_rule="time_step", skip=True, merged_norm=True
        ),
    ),
    "gla": Variant(replace(_RETENTION, decay="channel"), replace(_RETENTION_LAYER, rotary=False)),
    # The paper's sequel.
    "2mamba": Variant(replace(_SQUARE, decay="token"), _SEQUEL_LAYER),
    "2mamba_e": Variant(Spec(decay="token"), _SEQUEL_LAYER),
    # Softmax with a decay, a gate per channel, a sink.
    "forgetting": Variant(Spec(decay="token"), Layer(rotary=False)),
    "gated_attention": Variant(Spec(output_gate="after_norm"), Layer(gate_per_channel=True)),
    "attention_sink": Variant(Spec(denominator="sum_plus_sink")),
    # A finite series.
    "power_retention": Variant(replace(_SQUARE, decay="token")),
    "based": Variant(_TAYLOR, Layer(qk_dim=16)),
    "rebased": Variant(_SQUARE, Layer(feature_map="rebased")),
    "taylorshift": Variant(
        replace(_TAYLOR, scale=1.0), Layer(feature_map="cosine", temperature=True)
    ),
    # Linear attention of other features.
    "performer": Variant(_POSITIVE_FEATURES, Layer(feature_map="performer")),
    "rfa": Variant(_FEATURES, Layer(feature_map="rfa")),
    "cosformer": Variant(
        replace(_FEATURES, floor=1e-6), Layer(feature_map="cosformer", rotary=False)
    ),
    "hedgehog": Variant(_POSITIVE_FEATURES, Layer(feature_map="hedgehog")),
    # Windows.
    "window": Variant(Spec(window=_WINDOW)),
    "window_taylor": Variant(replace(_TAYLOR, window=_WINDOW, outside="series")),
    "lolcats": Variant(
        Spec(series="power", order=1, window=_WINDOW, outside="series"),
        Layer(feature_map="hedgehog", map_before_rotary=True),
    ),
    "window_state": Variant(
        Spec(series="power", order=1, window=_WINDOW, global_keys=1, outside="series"),
        Layer(feature_map="squared_relu", map_before_rotary=True),
    ),
    # The paper's norm, of a finite series.
    "taylor_norm": Variant(replace(_TAYLOR, denominator="none", norm="l2")),
    "polynomial": Variant(Spec(series="polynomial", order=2, denominator="none", norm="l2")),
}
