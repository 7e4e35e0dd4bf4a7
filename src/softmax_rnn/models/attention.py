"""The attention layer with Llama's interface: transformers' masks and caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.ops.layer import Attention


class LlamaAttention(Attention):
    """:class:`softmax_rnn.Attention` as a replacement of transformers' ``LlamaAttention``.

    Args:
        layer_idx: the layer's place in a cache.
        args: arguments of the base class.
        kwargs: keyword arguments of the base class.
    """

    def __init__(self, *args: Any, layer_idx: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_idx = layer_idx

    def forward(  # type: ignore[override]  # the arguments of transformers' decoder layer
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend causally.

        Args:
            hidden_states: [B, T, hidden_size].
            position_embeddings: the rotary cosines and sines, each [B or 1, T, head_dim].
            attention_mask: ``None`` for causal attention to all keys (those of the cache
                included), [B, 1, 1, S] for causal attention to some of them, else the full mask
                [B, 1, T, S]: boolean, or additive with 0 = visible.
            past_key_values: a key/value cache to extend, or a :class:`RecurrentCache`, for which
                the mask covers only the new keys.

        Returns:
            The output [B, T, hidden_size], and ``None`` instead of attention weights.
        """
        q, k, v = self.project(hidden_states, position_embeddings)
        mask = _visible(attention_mask)
        options = {"causal": mask is None or mask.shape[-2] == 1, "mask": mask}
        if isinstance(past_key_values, RecurrentCache):
            cached = past_key_values.layer(self.layer_idx)
            out, cached.state = self.attend(
                hidden_states, q, k, v, state=cached.state, return_state=True, **options
            )
        else:
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            out = self.attend(hidden_states, q, k, v, **options)
        return self.merge(out), None


def _visible(mask: Tensor | None) -> Tensor | None:
    """A boolean mask, True = visible, of a boolean or an additive one."""
    if mask is None or (mask.dtype == torch.bool and mask.ndim == 4):
        return mask
    if mask.ndim != 4 or not mask.is_floating_point():
        raise ValueError(
            "attention_mask must be [B, 1, T or 1, S], boolean (True = visible) or additive "
            f"(0 = visible), not {mask.dtype} of shape {list(mask.shape)}."
        )
    return mask == 0
