"""The cache of a converted model: per layer a state, or keys and values with their gates.

Masks are made for all tokens so far, whatever a layer holds: a layer takes the last part.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from softmax_rnn.models.cache import RecurrentLayer


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
    """Keys and values of the last tokens, with further channels for their gates and decays.

    Args:
        window: number of keys that a query sees; ``None`` for all.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.tokens = 0
        self.held: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; the keys and values that they can see, and their own."""
        self.tokens += key_states.shape[2]
        return self._extend("keys", key_states), self._extend("values", value_states)

    def extend(self, gates: Tensor) -> Tensor:
        """Add the gates [B, Hkv, T, N] of tokens, after :meth:`update` with their keys."""
        return self._extend("gates", gates)

    def _extend(self, name: str, new: Tensor) -> Tensor:
        known = torch.cat((self.held[name], new), dim=2) if name in self.held else new
        first = 0 if self.window is None else max(0, known.shape[2] - self.window + 1)
        self.held[name] = known[:, :, first:]
        return known

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
        self.tokens, self.held = 0, {}

    def crop(self, *_: Any) -> NoReturn:
        """Raise an error: a window does not hold the keys that would become visible again."""
        raise ValueError(
            "The cache of a converted model cannot be cropped. Assisted decoding needs a "
            "DynamicCache: leave past_key_values out."
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the batch, for beam search."""
        self.held = {name: x[beam_idx.to(x.device)] for name, x in self.held.items()}

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self.held = {name: x.repeat_interleave(repeats, dim=0) for name, x in self.held.items()}
