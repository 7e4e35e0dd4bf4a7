"""The layers of a cache of states: one state each, and the tokens that it can take back."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from softmax_rnn.ops import AttentionCore, AttentionSpec, Projected, State


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
