"""A cache of states for generation: constant memory and constant time per token."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache

from softmax_rnn._utils.files import file_aside
from softmax_rnn.models.cache_layers import LAYERS, RecurrentLayer
from softmax_rnn.models.cache_sizes import cache_bytes


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

    def __init__(self, static: bool = False, layers: list[Any] | None = None) -> None:
        kind = {"layer_class_to_replicate": RecurrentLayer} if layers is None else {}
        super().__init__(layers=layers, **kind)
        self.static = static
        self.record_past = False
        self._unrecorded = 0  # tokens before those that layers of a family's own kind record

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
        """Keep nothing more for :meth:`crop`, which still takes back what was recorded.

        Layers of a family's own kind, such as convolutions, drop that as well.
        """
        self._record_past(False)

    def _record_past(self, recording: bool) -> None:
        if not (recording and self.record_past):
            self._drop_recorded()
        self.record_past = recording
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = recording

    @property
    def _others(self) -> list[Any]:
        """The layers of a family's own kind."""
        return [layer for layer in self.layers if type(layer) not in LAYERS.values()]

    @property
    def _recorded(self) -> int:
        """How many tokens those layers have recorded; they do not say."""
        return int(self.get_seq_length()) - self._unrecorded if self.record_past else 0

    def _drop_recorded(self) -> None:
        """Bring those layers back to the size that they have without a record."""
        if self._recorded > 0:
            for layer in self._others:
                if getattr(layer, "record_past", False):
                    layer.crop(0)
        self._unrecorded = int(self.get_seq_length())

    def reset(self) -> None:
        """Delete all tokens."""
        self._drop_recorded()
        super().reset()
        self._unrecorded = 0

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
        others = self._others
        for layer in others if count else ():
            if not getattr(layer, "is_croppable", False):  # older versions do not say
                raise ValueError(f"A {type(layer).__name__} cannot take tokens back.")
        limits = [layer.removable for layer in own]
        limits += [self._recorded for layer in others if hasattr(layer, "record_past")]
        most = min(limits, default=-count if others else 0)
        if -count > most:
            raise ValueError(
                f"crop({count}) takes back {-count} tokens, but only {most} can be taken back: "
                "those since activate_past_recording(), the last crop, or a change of the batch."
            )
        for layer in (*(others if count else ()), *own):
            layer.crop(count)
        self._drop_recorded()

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
                    layers.append(kind.restored(tensors.pop(index), state, static))
            counts = {int(layer.get_seq_length()) for layer in layers}
            if tensors or len(counts) != 1:
                raise ValueError(f"layers of {sorted(counts)} tokens, and others: {[*tensors]}")
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not what RecurrentCache.save wrote: {type(error).__name__}: {error}"
            ) from error
        return cls(static, layers)


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
