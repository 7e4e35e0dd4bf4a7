"""Converted models as classes: configuration and model of any family, saved and loaded.

A saved model has a model type of its own, so that transformers cannot read it as the family's own
model, with plain softmax. The type says what to import.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import modeling_auto

from softmax_rnn._utils.errors import shown
from softmax_rnn.conversion.cache import KeyValueLayer, StateLayer
from softmax_rnn.conversion.layer import CONVERTED, ConvertedLayer, converted_layers
from softmax_rnn.conversion.record import ConvertedAttention
from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.models.cache_sizes import state_bytes
from softmax_rnn.models.generation import OwnCacheGeneration, with_own_cache
from softmax_rnn.models.initialization import reset_unloaded

# The model type in a file. transformers prints it first, if it does not know it or if another class
# is asked to read the file.
SAVED_TYPE = "import softmax_rnn.models to load this converted model"
_TYPES = (CONVERTED, SAVED_TYPE)
# Any other class of configuration reads the keys of id2label as numbers, and fails with this text.
_GUARD = "import softmax_rnn.models and use an Auto class to load this converted model"
_OF = "__"  # between the names of a class of models and of a family that shares it

# The Auto classes that load converted models, each with its table of families.
_AUTO = {
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
}


class ConvertedConfig(PreTrainedConfig):
    """The registered class; :meth:`from_dict` returns one of the source's own class.

    That class is a subclass of the source's, with all its fields, and ``softmax_rnn``: the source's
    model type and the converted layers (:class:`ConvertedAttention`).
    """

    model_type = CONVERTED

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of a converted model.

        Raises:
            ValueError: for an unknown family.
        """
        found = config_dict.get("softmax_rnn")
        source = found.get("source") if isinstance(found, dict) else None
        if not isinstance(source, str) or source not in CONFIG_MAPPING or source in _TYPES:
            raise ValueError(
                f"softmax_rnn.source of a converted model must be a model type of transformers, "
                f"not {shown(source)}."
            )
        family = CONFIG_MAPPING[source]
        names = config_dict.get("architectures") or [""]
        name = str(names[0]).removeprefix("Converted").partition(_OF)[0]
        kind = getattr(transformers, name, None) if name.isidentifier() else None
        register(family, kind if isinstance(kind, type) else None)
        return converted_config(family).from_dict(config_dict, **kwargs)


class _SavedConfig(ConvertedConfig):
    """The same, under the model type of files; earlier versions wrote ``softmax_rnn_converted``."""

    model_type = SAVED_TYPE


class _OfFamily:
    """What the configurations of all families share."""

    softmax_rnn: Any
    num_hidden_layers: int

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**{**kwargs, "attn_implementation": CONVERTED})  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        fields = {**config_dict, "model_type": CONVERTED}
        labels = {key: x for key, x in (fields.get("id2label") or {}).items() if key != _GUARD}
        if "id2label" in fields:
            fields["id2label"] = labels or None
        return super().from_dict(fields, **kwargs)  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        """What a file contains."""
        fields: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        labels = {str(key): x for key, x in (fields.get("id2label") or {}).items()}
        return {**fields, "model_type": SAVED_TYPE, "id2label": {**labels, _GUARD: ""}}

    @property
    def converted_layers(self) -> list[ConvertedAttention]:
        """The converted layers of ``softmax_rnn``."""
        layers = self.softmax_rnn.get("layers") if isinstance(self.softmax_rnn, dict) else None
        if not isinstance(layers, list):
            raise ValueError("A converted model's configuration is made by softmax_rnn.convert.")
        records = [ConvertedAttention.from_dict(layer) for layer in layers]
        indices = [record.index for record in records]
        layers_of_model = self.num_hidden_layers
        if len(set(indices)) < len(indices) or max(indices, default=0) >= layers_of_model:
            raise ValueError(
                "The converted layers of a configuration must have different indices below "
                f"{layers_of_model}, not {indices}."
            )
        return records


class ConvertedModel(PreTrainedModel):
    """What the converted models of all families share."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.set_attn_implementation()
        base = self.base_model
        for record in config.converted_layers:
            try:
                module = base.get_submodule(record.module)
            except AttributeError:
                raise ValueError(
                    f"The converted layer {record.module!r} is no module of {type(base).__name__}."
                ) from None
            ConvertedLayer(record).attach(module)

    def initialize_weights(self) -> None:
        """As the base class, plus the attention's own parameters; loaded weights do not change."""
        super().initialize_weights()
        reset_unloaded(self)

    def train(self, mode: bool = True) -> Any:
        """As the base class, with a warning if all parameters of the new attention are frozen."""
        if mode and (frozen := _only_new_is_frozen(self)):
            warnings.warn(
                f"{frozen:,} parameters of this model's new attention are frozen, while others are "
                "trained. With peft, give modules_to_save=softmax_rnn.modules_to_save(model); "
                "else set requires_grad of the modules named softmax_rnn.",
                stacklevel=2,
            )
        return super().train(mode)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the base class; ``attn_implementation`` is ignored."""
        return super().from_pretrained(*args, **{**kwargs, "attn_implementation": CONVERTED})

    def set_attn_implementation(self, *_: Any, **__: Any) -> None:
        """Keep the converted attention."""
        super().set_attn_implementation(CONVERTED)

    def new_cache(self) -> Cache:
        """An empty cache for this model, also that of ``generate`` and ``use_cache=True``.

        A layer with a finite series has a state, unless the states exceed the model; one with a
        window holds its last keys, and every other one all keys. If no layer has anything of its
        own, it is transformers' ``DynamicCache``.
        """
        usual = DynamicCache(config=self.config)
        layers: list[Any] = list(usual.layers)
        every = [x.record for x in self.modules() if isinstance(x, ConvertedLayer)]
        records = [record for record in every if record.index < len(layers)]  # of an early exit
        sizes = {record.index: _state_bytes(record, self.dtype) for record in records}
        total = sum(size or 0 for size in sizes.values())
        large = total > self.num_parameters() * self.dtype.itemsize
        any_own = False
        for record in records:
            spec, has_state = record.spec, sizes[record.index] is not None and not large
            windows = [x for x in (spec.hiding_window, record.sliding_window) if x]
            gated = spec.input_gate or spec.decay in ("token", "channel")
            own = gated or record.options.map_before_rotary or bool(spec.hiding_window)
            if has_state:
                layers[record.index] = StateLayer()
            elif own or type(layers[record.index]) in (DynamicLayer, DynamicSlidingWindowLayer):
                window = min(windows) if windows and not spec.global_keys else None
                layers[record.index] = KeyValueLayer(window)
            any_own |= own or has_state
        return RecurrentCache(layers=layers) if any_own else usual


def _only_new_is_frozen(model: PreTrainedModel) -> int:
    """How many parameters the new attention has, if none of them is trained but others are."""
    own = [x for layer in converted_layers(model) for x in layer.parameters()]
    if not own or any(x.requires_grad for x in own):
        return 0
    others = any(x.requires_grad for x in model.parameters())
    return sum(x.numel() for x in own) if others else 0


def _state_bytes(record: ConvertedAttention, dtype: torch.dtype) -> int | None:
    """Bytes of a layer's state for one row; ``None`` if it can have none."""
    spec = record.spec
    if not record.causal or record.sliding_window:
        return None
    if not spec.has_state:
        return None
    widths = record.key_width, record.value_width
    return state_bytes(spec, record.options, record.num_kv_heads, *widths, dtype)


@functools.cache
def converted_config(source: Any) -> Any:
    """The class of configurations of a family's converted models."""

    class Converted(_OfFamily, source):
        model_type = CONVERTED
        softmax_rnn: Any = None

    return _named(Converted, source)


def converted_model(source: Any, family: Any = None) -> Any:
    """The class of the converted models of a class of models.

    ``family`` is the class of their configurations, if it is not the one that the class names.
    """
    return _model_class(source, family or source.config_class)


@functools.cache
def _model_class(source: Any, family: Any) -> Any:
    own = (OwnCacheGeneration,) if issubclass(source, GenerationMixin) else ()

    class Converted(ConvertedModel, *own, source):  # type: ignore[misc]
        config_class = converted_config(family)
        if own:
            forward = with_own_cache(source.forward)

    _named(Converted, source)
    if family is not source.config_class:
        Converted.__name__ = Converted.__qualname__ = f"{Converted.__name__}{_OF}{family.__name__}"
    mapping = get_checkpoint_conversion_mapping(
        source.__name__
    ) or get_checkpoint_conversion_mapping(family.model_type)
    if mapping is not None:  # how files name and split weights
        register_checkpoint_conversion_mapping(Converted.__name__, mapping, True)
    return Converted


def _named(converted: Any, source: Any) -> Any:
    converted.__name__ = converted.__qualname__ = f"Converted{source.__name__}"
    converted.__doc__ = f"{source.__name__} with an attention of this library."
    return converted


def __getattr__(name: str) -> Any:
    """A class of this module by its name, for pickle."""
    source, _, family = (
        getattr(transformers, part, None) for part in name.removeprefix("Converted").partition(_OF)
    )
    if not name.startswith("Converted") or not isinstance(source, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_config = issubclass(source, PreTrainedConfig)
    return converted_config(source) if is_config else converted_model(source, family)


@functools.cache
def register(family: Any, model: Any = None) -> None:
    """Make the Auto classes know the converted models of a family's class of configurations.

    ``model`` is one of its classes of models, for a configuration that no table has: the decoder's
    of a model with several parts.
    """
    for name, table in _AUTO.items():
        families, names = getattr(transformers, table), getattr(modeling_auto, f"{table}_NAMES")
        found = families.get(family, None)
        if found is None and model is not None and model.__name__ in names.values():
            found = model
        if found is not None:
            found = found[0] if isinstance(found, tuple) else found
            converted = converted_config(family), converted_model(found, family)
            getattr(transformers, name).register(*converted, exist_ok=True)


for _registered in (ConvertedConfig, _SavedConfig):
    AutoConfig.register(_registered.model_type, _registered)
