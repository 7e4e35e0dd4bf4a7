"""The configuration: Llama's, plus the attention and its layer's options as data."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig

from softmax_rnn._utils.errors import unknown
from softmax_rnn.ops import AttentionSpec, LayerOptions, resolve_layer
from softmax_rnn.sizes import SIZES

# Name under which the mask maker is registered (see modeling.py).
MASKING = "softmax_rnn"


class SoftmaxRNNConfig(LlamaConfig):
    """Llama's configuration and ``attention``: a variant's name, a spec, or a spec's dict.

    ``layer_options`` are :class:`LayerOptions` or a dict of some of its fields, which replace those
    of a variant; by default the variant's. Both are stored as full dicts, so that a saved model
    does not depend on the later meaning of a name. ``attn_implementation`` is ignored.

    With ``is_causal=False`` each token sees the later ones too, as the encoders need; there is then
    no cache. A short convolution of the layer still sees earlier tokens alone.

    Example:
        >>> SoftmaxRNNConfig(attention="norm", **SIZES["demo"]).attention["norm"]
        'l2'
    """

    model_type = "softmax_rnn"
    attention: Any = "softmax"
    layer_options: Any = None
    is_causal: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Resolve ``attention`` and ``layer_options`` to full dicts."""
        spec = self.attention
        spec = AttentionSpec.from_dict(spec) if isinstance(spec, dict) else spec
        found = resolve_layer(spec, self.layer_options)
        self.attention, self.layer_options = found.spec.to_dict(), found.options.to_dict()
        if self.attention_dropout:
            raise ValueError(
                f"attention_dropout must be 0, not {self.attention_dropout!r}: no form of this "
                "attention drops weights."
            )
        if not self.is_causal:
            self.use_cache = False
        super().__post_init__(**{**kwargs, "attn_implementation": MASKING})

    @property
    def spec(self) -> AttentionSpec:
        """``attention`` as an :class:`AttentionSpec`."""
        return AttentionSpec.from_dict(self.attention)

    @property
    def options(self) -> LayerOptions:
        """``layer_options`` as :class:`LayerOptions`."""
        return LayerOptions.from_dict(self.layer_options)

    @classmethod
    def of_size(cls, size: str, attention: Any = "softmax", **fields: Any) -> SoftmaxRNNConfig:
        """The configuration of a named size, with the paper's epsilon; ``fields`` override."""
        if size not in SIZES:
            raise unknown("model size", size, SIZES)
        return cls(attention=attention, **{"rms_norm_eps": 1e-5, **SIZES[size], **fields})


AutoConfig.register(SoftmaxRNNConfig.model_type, SoftmaxRNNConfig)
