"""The cache of a converted model: per layer a state, or keys and values with their gates.

Masks are made for all tokens so far, whatever a layer holds: a layer takes the last part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from softmax_rnn.models.cache_layers import LAYERS, RecurrentLayer
from softmax_rnn.ops import hidden_first, taken


class StateLayer(RecurrentLayer):
    """A state; the family's module gets back the new keys and values alone."""

    def update(  # type: ignore[override]  # the base class raises an error
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The same keys and values; the attention updates the state."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length and offset of the mask: all tokens."""
        return int(self.get_seq_length()) + query_length, 0


class KeyValueLayer(CacheLayerMixin):
    """Keys and values of the last tokens, with further channels for what belongs to them.

    Args:
        window: number of keys that a query sees; ``None`` for all.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False
    record_past = False

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.tokens = 0
        self.held: dict[str, Tensor] = {}
        # [B, N] of the held tokens; None if they are the last ones as they came.
        self.shown: Tensor | None = None
        # Of a window: what it held before the recorded tokens, and these with their masks.
        self._before: Any = None
        self._past: list[dict[str, Any]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; the keys and values that they can see, and their own.

        :meth:`forget` then drops those that no later token sees.
        """
        if not self.record_past or self.window is None:
            self._past = []
        else:
            if not self._past:
                self._before = self.tokens, dict(self.held), self.shown
            self._past = [*self._past, {"mask": None}]
        self.tokens += key_states.shape[2]
        return self._extend("keys", key_states), self._extend("values", value_states)

    def extend(self, others: Tensor) -> Tensor:
        """Add what belongs to keys [B, Hkv, T, N], such as gates, after :meth:`update`."""
        return self._extend("others", others)

    def _extend(self, name: str, new: Tensor) -> Tensor:
        known = torch.cat((self.held[name], new), dim=2) if name in self.held else new
        self.held[name] = known
        if self._past:
            self._past[-1][name] = new
        return known

    def mask(self, mask: Tensor | None, new: int) -> Tensor:
        """The mask [B, 1, 1, S] of the held tokens: ``shown``, and the last ``new`` of a mask."""
        assert self.shown is not None
        rows = len(self.shown)
        shown = self.shown.new_ones(rows, new) if mask is None else mask[:, 0, -1, -new:]
        return torch.cat((self.shown, shown.expand(rows, -1)), dim=1)[:, None, None]

    def forget(self, mask: Tensor | None) -> None:
        """Drop the tokens that later ones do not see.

        ``mask`` [B or 1, 1, 1, S] shows the tokens that count in the window; ``None`` for all.
        """
        if self.window is None:
            return
        if self._past:
            self._past[-1]["mask"] = mask
        known = self.held["keys"].shape[2]
        shown = None if mask is None else mask[:, 0, 0].expand(len(self.held["keys"]), known)
        order = None if shown is None else hidden_first(shown)
        if shown is not None and order is not None:
            self.held = {name: taken(x, order) for name, x in self.held.items()}
            self.shown = taken(shown, order, dim=1)
        elif self.shown is not None:
            self.shown = shown
        first = max(0, known - self.window + 1)
        self.held = {name: x[:, :, first:] for name, x in self.held.items()}
        self.shown = None if self.shown is None else self.shown[:, first:]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(x.nbytes for x in self._tensors().values())

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, and the rest as plain data."""
        return self._tensors(), {"window": self.window, "tokens": self.tokens}

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], fields: dict[str, Any], static: bool) -> Self:
        """The layer of which :meth:`saved` has returned these."""
        window, tokens, held = fields["window"], fields["tokens"], dict(tensors)
        numbers = (window is None or type(window) is int) and type(tokens) is int
        if static or not numbers or tokens < 0 or (window is not None and window < 1):
            raise ValueError(f"keys and values cannot be static={static}, {fields}")
        layer = cls(window)
        layer.tokens, layer.shown, layer.held = tokens, held.pop("shown", None), held
        kept = tokens if window is None else min(tokens, window - 1)
        shape = [*held["keys"].shape[:2], kept]
        shapes = [[*x.shape[:3]] for x in held.values() if x.ndim == 4 and x.is_floating_point()]
        named = {"keys", "values"} <= held.keys() <= {"keys", "values", "others"}
        if not named or shapes != [shape] * len(held):
            raise ValueError(f"keys, values and others must be real numbers {shape}, not {shapes}")
        shown = layer.shown
        if shown is not None and (shown.dtype != torch.bool or [*shown.shape] != shape[::2]):
            raise ValueError(f"shown must be booleans {shape[::2]}, not {list(shown.shape)}")
        return layer

    def _tensors(self) -> dict[str, Tensor]:
        return self.held if self.shown is None else {**self.held, "shown": self.shown}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first tokens create the tensors."""

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length and offset of the mask: all tokens."""
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        """There is no maximum: -1."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    def reset(self) -> None:
        """Delete everything."""
        self.tokens, self.held, self.shown, self._past = 0, {}, None, []

    def activate_past_recording(self) -> None:
        """Keep what a window holds before the next tokens, and these."""
        self.record_past = True

    @property
    def removable(self) -> int:
        """How many tokens :meth:`crop` can take back."""
        recorded = sum(call["keys"].shape[2] for call in self._past)
        return self.tokens if self.window is None else recorded

    def crop(self, tokens_to_remove: int) -> None:
        """Take back up to :attr:`removable` tokens, a number <= 0."""
        kept, past, self._past = self.removable + tokens_to_remove, self._past, []
        if not tokens_to_remove:
            return
        if self.window is None:
            self.tokens = kept
            self.held = {name: x[:, :, :kept] for name, x in self.held.items()}
            return
        self.tokens, held, self.shown = self._before
        self.held = dict(held)
        for call in past:
            new = call["keys"].shape[2]
            tokens = min(kept, new)
            kept -= tokens
            if tokens > 0:
                self.tokens += tokens
                mask = call["mask"]
                for name, x in call.items():
                    if name != "mask":
                        self._extend(name, x[:, :, :tokens])
                self.forget(mask if mask is None else mask[..., : mask.shape[-1] - new + tokens])

    def copied(self) -> Self:
        """A layer of its own with the same keys and values."""
        twin = copy.copy(self)
        twin.held = dict(self.held)  # tensors are replaced, not changed
        return twin

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the batch, for beam search."""
        self._select(lambda x: x[beam_idx.to(x.device)])

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self._select(lambda x: x.repeat_interleave(repeats, dim=0))

    def _select(self, rows: Callable[[Tensor], Tensor]) -> None:
        self.held = {name: rows(x) for name, x in self.held.items()}
        self.shown, self._past = None if self.shown is None else rows(self.shown), []


def with_earlier(
    new: Iterable[Tensor | None], key: Tensor, tokens: int, layer: Any
) -> list[Tensor | None]:
    """What belongs to keys [B, Hkv, S, D], of the last ``tokens`` and of the earlier ones.

    ``new`` are tensors of the last ones, [B, Hkv, T] or [B, Hkv, T, N]. With a state there are no
    others; a :class:`KeyValueLayer` holds the earlier ones.

    Raises:
        ValueError: for a layer of another cache, which does not hold them.
    """
    new = list(new)
    given = [x for x in new if x is not None]
    if not given or isinstance(layer, StateLayer):
        return new
    flat = [x.reshape(*key.shape[:2], tokens, -1) for x in given]
    joined = torch.cat(flat, dim=-1)
    if isinstance(layer, KeyValueLayer):
        joined = layer.extend(joined)
    elif key.shape[2] != tokens:
        raise ValueError(
            f"A {type(layer).__name__} does not hold the gates, decays or unrotated keys of "
            "earlier tokens: give past_key_values=model.new_cache(), or use_cache=False."
        )
    parts = iter(joined.split([x.shape[-1] for x in flat], dim=-1))
    every = [(x, None if x is None else next(parts)) for x in new]
    return [y[..., 0] if x is not None and y is not None and x.ndim == 3 else y for x, y in every]


LAYERS.update(converted_state=StateLayer, keys_and_values=KeyValueLayer)
