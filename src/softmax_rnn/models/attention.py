"""The attention layer with Llama's interface: transformers' masks and caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.models.masks import segments_shown
from softmax_rnn.ops import Attention, Projected, Segments, require_first_keys, segments_of


class LlamaAttention(Attention):
    """:class:`softmax_rnn.Attention` as a replacement of transformers' ``LlamaAttention``.

    Args:
        layer_idx: the layer's place in a cache.
        is_causal: whether a token sees no later ones.
        args: arguments of the base class.
        kwargs: keyword arguments of the base class.
    """

    def __init__(self, *args: Any, layer_idx: int, is_causal: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_idx, self.is_causal = layer_idx, is_causal

    def forward(  # type: ignore[override]  # the arguments of transformers' decoder layer
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend to earlier tokens; to all of them if the layer is not causal.

        Args:
            hidden_states: [B, T, hidden_size].
            position_embeddings: the rotary cosines and sines, each [B or 1, T, head_dim].
            attention_mask: ``None`` for attention to all keys (those of the cache included),
                [B, 1, 1, S] for attention to some of them, both causal in a causal layer; else the
                full mask [B, 1, T, S]: boolean, or additive with 0 = visible.
            past_key_values: a key/value cache to extend, or a :class:`RecurrentCache`, for which
                the mask covers only the new keys.
            position_ids: the tokens' positions [B or 1, T].
            options: further arguments of transformers; ``cu_seq_lens_q`` tells where packed
                sequences begin, as does a full mask of them. Each is computed alone.

        Returns:
            The output [B, T, hidden_size], and ``None`` instead of attention weights.

        Raises:
            ValueError: for a mask or cache that this attention cannot use; see :meth:`_extend`.
        """
        if past_key_values is not None and not self.is_causal:
            raise ValueError(
                "Attention that sees later tokens (is_causal=False) has no cache, since each new "
                "token would change all outputs: give use_cache=False and no past_key_values."
            )
        mask = None if attention_mask is None else _visible(attention_mask)
        cached = past_key_values is not None
        ids = segments_shown(mask, hidden_states.shape[1], self.is_causal, options, cached)
        if ids is not None:
            tokens = hidden_states, position_embeddings, position_ids
            return self._each_segment(segments_of(ids, len(hidden_states)), *tokens), None
        recurrent = None
        if isinstance(past_key_values, RecurrentCache):
            recurrent = past_key_values.layer(self.layer_idx)
        state = None if recurrent is None else recurrent.state
        projected = self.project(
            hidden_states, position_embeddings, positions=position_ids, mask=mask, state=state
        )
        if past_key_values is not None and recurrent is None:
            projected = self._extend(projected, past_key_values)
        options = {"mask": mask, "causal": self.is_causal}
        if mask is not None:
            options["causal"] = self._is_causal(mask, projected, past_key_values)
            require_first_keys(self.spec, mask)
        attend = self.attend if recurrent is None else partial(recurrent.attend, self)
        out = attend(hidden_states, projected, **options)
        return self.merge(out), None

    def _each_segment(
        self,
        segments: Segments,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """The output of packed sequences, each alone."""
        parts = zip(
            segments.split(hidden_states, 1),
            segments.split_all(position_embeddings, 1),
            segments.split_mask(None, self.is_causal),
            segments.split_all(position_ids, 1),
            strict=True,
        )
        outs = [
            self.forward(x, rotary, mask, position_ids=places)[0]
            for x, rotary, mask, places in parts
        ]
        return segments.join(outs, 1)

    def _extend(self, projected: Projected, cache: Cache) -> Projected:
        """Add the tokens to a key/value cache, and return the earlier ones as well.

        The keys outside a window and log decays are further channels of the cached keys.

        Raises:
            ValueError: with a short convolution, whose last inputs no such cache holds, unless
                these are the first tokens.
        """
        if self.short_convolution is not None and cache.get_seq_length(self.layer_idx):
            raise ValueError(
                f"A {type(cache).__name__} does not hold the last inputs of a short convolution: "
                "use a RecurrentCache (for a finite series), or use_cache=False."
            )
        log_decay = projected.log_decay
        if log_decay is None and projected.outside_k is None:
            k, v = cache.update(projected.k, projected.v, self.layer_idx)
            return Projected(projected.q, k, v, *projected[3:])
        fixed = log_decay is None or log_decay.ndim == 1  # the same for every token
        parts = [projected.k, projected.outside_k, None if fixed else log_decay]
        found = [x.reshape(*projected.k.shape[:3], -1) for x in parts if x is not None]
        k, v = cache.update(torch.cat(found, dim=-1), projected.v, self.layer_idx)
        found = list(k.split([x.shape[-1] for x in found], dim=-1))
        if log_decay is not None and not fixed:
            decays = found.pop()
            log_decay = decays.reshape(*k.shape[:3], *log_decay.shape[3:])
        k, outside_k = found if len(found) == 2 else (found[0], None)
        return projected._replace(k=k, v=v, log_decay=log_decay, outside_k=outside_k)

    def _is_causal(self, mask: Tensor, projected: Projected, cache: Cache | None) -> bool:
        """Whether the operation has to hide later keys; a full mask hides them itself.

        Raises:
            ValueError: with a decay or window, if the queries are not the last keys.
        """
        if not self.is_causal:
            return False
        if mask.shape[-2] == 1 or not self.spec.positional:
            return mask.shape[-2] == 1
        keys = projected.k.shape[2]
        if cache is not None and int(cache.get_seq_length(self.layer_idx)) != keys:
            raise ValueError(
                f"A {type(cache).__name__} of fixed length has unused keys after the newest one, "
                "but with a decay or a window the newest key must be the last: use a DynamicCache "
                "(cache_implementation='dynamic')."
            )
        return True


def _visible(mask: Tensor) -> Tensor:
    """A boolean mask, True = visible, of a boolean or an additive one."""
    if mask.dtype == torch.bool and mask.ndim == 4:
        return mask
    if mask.ndim != 4 or not mask.is_floating_point():
        raise ValueError(
            "attention_mask must be [B, 1, T or 1, S], boolean (True = visible) or additive "
            f"(0 = visible), not {mask.dtype} of shape {list(mask.shape)}."
        )
    return mask == 0
