"""A cache of states for generation: constant memory and constant time per token."""

from __future__ import annotations

import copy
import itertools
import json
import os
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from softmax_rnn._utils.files import file_aside
from softmax_rnn.ops import (
    FEATURE_MAPS,
    AttentionCore,
    AttentionSpec,
    LayerOptions,
    Projected,
    State,
    compute_dtype,
    key_widths,
    powers,
    state_size,
)


class RecurrentCache(Cache):
    """One :class:`State` per layer instead of keys and values.

    For models whose attention is a finite series without a clamp. Our own models and converted ones
    make one by default (``new_cache()``), in ``generate`` and for ``use_cache=True``, unless the
    states are larger than the model. That of a converted model has layers of keys and values where
    an attention has no state. For a short text, a key/value cache is smaller and faster
    (``cache_implementation="dynamic"``).

    Args:
        static: update the states in place, for steps by ``torch.compile``, which are then compiled
            once. Where transformers compiles, as on a GPU, ``generate`` does so by itself.
        layers: those of a converted model, by its ``new_cache()``; by default, states are added as
            layers need them.

    Example:
        >>> out = model(ids, use_cache=True)
        >>> out.past_key_values.nbytes
        26640
        >>> out = model.generate(ids, past_key_values=RecurrentCache(), max_new_tokens=100)
    """

    record_past = False

    def __init__(self, static: bool = False, layers: list[Any] | None = None) -> None:
        kind = {"layer_class_to_replicate": RecurrentLayer} if layers is None else {}
        super().__init__(layers=layers, **kind)
        self.static = static

    @property
    def is_compileable(self) -> bool:
        """Whether it is static; ``generate`` asks before there are layers."""
        return self.static

    def layer(self, index: int) -> RecurrentLayer:
        """The layer ``index``, created on first use."""
        while len(self.layers) <= index:
            self.layers.append(RecurrentLayer(self.static))
            self.layers[-1].record_past = self.record_past
        return self.layers[index]

    def activate_past_recording(self) -> None:
        """From now on, keep what :meth:`crop` needs to take tokens back; ``crop`` drops it."""
        self._record_past(True)

    def end_past_recording(self) -> None:
        """Keep nothing more for :meth:`crop`, which still takes back what was recorded."""
        self._record_past(False)

    def _record_past(self, recording: bool) -> None:
        self.record_past = recording
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = recording

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, as if they had never come: ``crop(-3)`` takes back three.

        A state needs the tokens since :meth:`activate_past_recording` or the last ``crop``, and so
        does a window. ``crop(0)`` takes nothing back, and drops what was recorded.

        Raises:
            ValueError: before anything changes, for a positive number, or more tokens than were
                recorded, or a layer of a family's own kind that cannot take tokens back.
        """
        count = tokens_to_remove
        if isinstance(count, bool) or not isinstance(count, int) or count > 0:
            raise ValueError(
                "crop takes the number of tokens to take back as an integer <= 0, such as -3, not "
                f"{count!r}."
            )
        own = [layer for layer in self.layers if type(layer) in LAYERS.values()]
        others = [layer for layer in self.layers if type(layer) not in LAYERS.values()]
        for layer in others if count else ():
            if not getattr(layer, "is_croppable", False):  # older versions do not say
                raise ValueError(f"A {type(layer).__name__} cannot take tokens back.")
        most = min((layer.removable for layer in own), default=-count if others else 0)
        if -count > most:
            raise ValueError(
                f"crop({count}) takes back {-count} tokens, but only {most} can be taken back: "
                "those since activate_past_recording(), the last crop, or a change of the batch."
            )
        for layer in (*others, *own):
            layer.crop(count)

    def snapshot(self) -> RecurrentCache:
        """A cache of its own with the same tokens: what comes after them changes only one of both.

        States, keys and values are shared, since nothing changes them in place. Those of a static
        cache, or of a layer of a family's own kind, are copied.
        """
        twin = copy.copy(self)
        twin.layers = [_copied(layer) for layer in self.layers]
        return twin

    def restore(self, snapshot: RecurrentCache) -> None:
        """Become what another cache of this model is; a static cache keeps its addresses.

        Raises:
            ValueError: for something else than a cache with layers of the same kinds.
        """
        kinds = [
            [type(layer).__name__ for layer in getattr(x, "layers", [])] for x in (self, snapshot)
        ]
        if not isinstance(snapshot, RecurrentCache) or (all(kinds) and kinds[0] != kinds[1]):
            raise ValueError(
                f"restore takes a snapshot of a cache of this model, with the layers {kinds[0]}, "
                f"not a {type(snapshot).__name__} with {kinds[1]}."
            )
        if not self.static:
            self.__dict__.update(vars(snapshot.snapshot()))
            return
        if not snapshot.layers:
            self.reset()
        for index, layer in enumerate(snapshot.layers):
            self.layer(index).state = layer.state

    @property
    def nbytes(self) -> int:
        """Size in bytes; that of states is the same for any length of the sequence."""
        return cache_bytes(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the states, keys and values to a safetensors file.

        Raises:
            ValueError: before the first tokens, and for layers of a family's own kind.
        """
        path = Path(path)
        if not self.layers:
            raise ValueError("The cache is empty.")
        tensors, states = {}, []
        for index, layer in enumerate(self.layers):
            kind = next((name for name, found in LAYERS.items() if type(layer) is found), None)
            if kind is None:
                raise ValueError(f"A {type(layer).__name__}, layer {index}, cannot be saved.")
            found, fields = layer.saved()
            if not found:
                raise ValueError(f"Layer {index} of the cache is empty.")
            for name, tensor in found.items():
                tensors[f"{index}.{name}"] = tensor.detach().contiguous()
            states.append({"layer": kind, **fields})
        with file_aside(path) as aside:
            save_file(tensors, aside, metadata={"states": json.dumps(states)})

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str = "cpu", static: bool = False
    ) -> RecurrentCache:
        """Read what :meth:`save` has written; ``static`` is for states of our own models.

        Raises:
            ValueError: for any other file, or one that is damaged.
        """
        layers: list[Any] = []
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                tensors: dict[int, dict[str, Tensor]] = {}
                for key in file.keys():  # noqa: SIM118  # the file is no mapping
                    index, _, name = key.partition(".")
                    tensors.setdefault(int(index), {})[name] = file.get_tensor(key)
                for index, state in enumerate(json.loads((file.metadata() or {})["states"])):
                    kind = LAYERS[state.get("layer", "state")]
                    layers.append(kind.restored(tensors[index], state, static))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not what RecurrentCache.save wrote: {type(error).__name__}: {error}"
            ) from error
        return cls(static, layers)


class RecurrentLayer(CacheLayerMixin):
    """The state of one layer, for transformers' generation."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False
    record_past = False
    _state: State | None = None
    # The state before the recorded tokens, and the arguments of :meth:`attend` since.
    _before: State | None
    _past: list[tuple[AttentionCore, Tensor, Projected, dict[str, Any]]]

    def __init__(self, static: bool = False) -> None:
        super().__init__()
        self.is_compileable = static
        self.state = None

    @property
    def state(self) -> State | None:
        """The state after all tokens so far; ``None`` before the first."""
        return self._state

    @state.setter
    def state(self, new: State | None) -> None:
        if new is None or not self.is_compileable:
            self._state = new
        elif self._state is None or self._state.sums.shape != new.sums.shape:
            self._state = new.fixed()
        else:
            self._state.update_(new)
        self._before, self._past = None, []  # of another state

    def attend(
        self, core: AttentionCore, hidden_states: Tensor, projected: Projected, **options: Any
    ) -> Tensor:
        """``core.attend`` of the tokens after the state, which then is the state after them."""
        before, past = self._before, self._past
        if self.record_past and not past:
            before = self._kept()
        out, self.state = core.attend(
            hidden_states, projected, state=self.state, return_state=True, **options
        )
        if self.record_past:
            self._before, self._past = before, [*past, (core, hidden_states, projected, options)]
        return out

    def _kept(self) -> State | None:
        """The state as it is now; one at fixed addresses would change."""
        return self.state.fixed() if self.state is not None and self.is_compileable else self.state

    def activate_past_recording(self) -> None:
        """Keep the state before the next tokens, and what it takes to compute those again."""
        self.record_past = True

    @property
    def removable(self) -> int:
        """How many tokens :meth:`crop` can take back."""
        return sum(projected.q.shape[2] for _, _, projected, _ in self._past)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back up to :attr:`removable` tokens, a number <= 0: those before are added again."""
        kept, state, past = self.removable + tokens_to_remove, self._before, self._past
        if not tokens_to_remove:
            state, past = self.state, []
        for core, hidden_states, projected, options in past:
            tokens = min(kept, projected.q.shape[2])
            if tokens > 0:
                mask = options.get("mask")
                shown = None if mask is None else mask[..., :tokens]
                options = {**options, "mask": shown, "state": state, "return_state": True}
                _, state = core.attend(
                    hidden_states[:, :tokens], projected.first(tokens), **options
                )
            kept -= tokens
        self.state = state

    def copied(self) -> Self:
        """A layer of its own with the same state."""
        twin = copy.copy(self)
        twin._state = self._kept()
        return twin

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: attention updates a state, keys and values do not."""
        raise ValueError(
            "A RecurrentCache holds states, not keys and values: it works with "
            "SoftmaxRNNForCausalLM and a finite series."
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first tokens create the state."""

    def get_seq_length(self) -> int | Tensor:
        """Positions seen so far; an int64 tensor in a static cache."""
        return 0 if self.state is None else self.state.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """The length and offset of the mask, which covers only the new keys."""
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        """There is no maximum: -1."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    @property
    def nbytes(self) -> int:
        """Size of the state in bytes."""
        return 0 if self.state is None else self.state.nbytes

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, and the rest as plain data; nothing before the first tokens."""
        if self.state is None:
            return {}, {}
        fields = {"spec": self.state.spec.to_dict(), "tokens": int(self.state.tokens)}
        return self.state.tensors, fields

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], fields: dict[str, Any], static: bool) -> Self:
        """The layer of which :meth:`saved` has returned these."""
        layer, spec = cls(static), AttentionSpec.from_dict(fields["spec"])
        tokens = fields["tokens"]
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"tokens must be an integer >= 0, not {tokens!r}.")
        layer.state = State.from_tensors(spec, tokens, tensors)
        layer.state.check_counts()
        return layer

    def reset(self) -> None:
        """Delete the state."""
        self.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the batch, for beam search."""
        if self.state is not None:
            self.state = self.state.select(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.state is not None:
            rows = torch.arange(len(self.state.visible), device=self.state.visible.device)
            self.state = self.state.select(rows.repeat_interleave(repeats))


# The layers that a saved cache may have, by their names in the file.
LAYERS: dict[str, Any] = {"state": RecurrentLayer}
# Where layers of transformers' caches have their tensors, or lists of them.
_TENSORS = ("keys", "values", "conv_states", "recurrent_states")


def cache_bytes(cache: Cache) -> int:
    """The size of a cache's tensors, of any kind."""
    return sum(_layer_bytes(layer) for layer in cache.layers)


def _copied(layer: Any) -> Any:
    """A layer of its own with the same content, of any kind."""
    if type(layer) in LAYERS.values():
        return layer.copied()
    twin = copy.copy(layer)  # some change their tensors in place
    twin.__dict__.update({name: _cloned(value) for name, value in vars(layer).items()})
    return twin


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cloned(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_cloned, value))
    return value.clone() if isinstance(value, Tensor) else value


def _layer_bytes(layer: Any) -> int:
    if type(layer) in LAYERS.values():
        return int(layer.nbytes)
    found: list[Any] = [getattr(layer, name, None) for name in _TENSORS]
    lists: list[list[Any]] = [list(x) if isinstance(x, list | tuple) else [x] for x in found]
    return sum(x.nbytes for x in itertools.chain(*lists) if isinstance(x, Tensor))


def recurrent_bytes(config: Any, dtype: torch.dtype, batch: int = 1) -> int | None:
    """Bytes of a recurrent cache for a model of ``config``; ``None`` if it can have none."""
    spec = config.spec
    if not spec.has_state:
        return None
    options, kv_heads = config.options, config.num_key_value_heads
    size = state_bytes(spec, options, kv_heads, config.head_dim, config.head_dim, dtype)
    if options.short_convolution:  # of queries, keys and values
        qk_dim = options.qk_dim or config.head_dim
        channels = (config.num_attention_heads + kv_heads) * qk_dim + kv_heads * config.head_dim
        size += (options.short_convolution - 1) * channels * dtype.itemsize
    return batch * config.num_hidden_layers * size


def state_bytes(
    spec: AttentionSpec,
    options: LayerOptions,
    kv_heads: int,
    head_dim: int,
    value_width: int,
    dtype: torch.dtype,
) -> int:
    """Bytes of a layer's sums and of the keys that it keeps besides, for one row of a batch."""
    width, outside = key_widths(spec, options, head_dim)
    numbers = state_size(spec, outside or width, value_width)
    if spec.sums_can_cancel:  # and the magnitudes, and the largest value
        numbers += len(powers(spec)) * (outside or width) + 1
    size = kv_heads * numbers * compute_dtype(dtype).itemsize
    decays = _decays(spec, width) or int(spec.decay == "head")
    kept = FEATURE_MAPS[spec.feature_map](torch.empty(1, dtype=dtype)).dtype.itemsize
    first = (width + value_width) * kept + decays * 8  # float64
    recent = first + (outside or 0) * kept
    for keys, each in ((spec.window or 0, recent), (spec.global_keys, first)):
        size += keys * (kv_heads * each + 1)  # and whether it is visible
    return size


def key_value_bytes(config: Any, dtype: torch.dtype, tokens: int, batch: int = 1) -> int:
    """Bytes of a key/value cache for a model of ``config`` after ``tokens`` tokens."""
    heads = batch * config.num_hidden_layers * config.num_key_value_heads
    keys, outside = key_widths(config.spec, config.options, config.head_dim)
    numbers = keys + (outside or 0) + _decays(config.spec, keys) + config.head_dim
    return heads * numbers * tokens * dtype.itemsize


def _decays(spec: AttentionSpec, width: int) -> int:
    """Number of log decays of a key of ``width``."""
    return {"token": 1, "channel": width}.get(spec.decay, 0)
