"""Attention over an endless sequence, piece by piece; only the state is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softmax_rnn._utils.units import bytes_text
from softmax_rnn.ops.attention import attention
from softmax_rnn.ops.monomials import degrees
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State
from softmax_rnn.ops.variants import resolve


class Stream:
    """Causal attention of a finite series over consecutive pieces of any length.

    Gradients stop at every call; to train through states, call ``attention`` with ``state``. The
    sums in a float32 state stop growing after about 2^24 = 16.8 million tokens (or calls, if each
    call has many tokens). Use float64 inputs for longer sequences.

    Args:
        spec: a finite series without a clamp, or the name of a variant with one, as for
            ``attention``.
        length_power: [H], as for ``attention``, if the spec uses it.
        coefficients: [H, N + 1], as for ``attention``, if the spec uses them.
        sink: [H], as for ``attention``, if the spec uses it.
        outside_scale: [H], as for ``attention``, if the spec uses it.
        norm_weight: [E], as for ``attention``.
        norm_bias: [E], as for ``attention``.
        state: the initial state; by default empty.

    Raises:
        ValueError: for a spec without a state.

    Example:
        >>> stream = Stream("taylor:2")
        >>> for piece in torch.randn(10, 3, 1, 4, 100, 16):  # ten pieces of 100 tokens
        ...     out = stream(*piece)
        >>> stream.tokens
        1000
    """

    def __init__(
        self,
        spec: AttentionSpec | str,
        *,
        length_power: Tensor | None = None,
        coefficients: Tensor | None = None,
        sink: Tensor | None = None,
        outside_scale: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        state: State | None = None,
    ) -> None:
        self.spec = resolve(spec)
        degrees(self.spec)  # raises if the spec has no state
        self.state = state
        self._parameters = {
            "length_power": length_power,
            "coefficients": coefficients,
            "sink": sink,
            "outside_scale": outside_scale,
            "norm_weight": norm_weight,
            "norm_bias": norm_bias,
        }

    @torch.no_grad()
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        input_gate: Tensor | None = None,
        output_gate: Tensor | None = None,
        log_decay: Tensor | None = None,
        outside_q: Tensor | None = None,
        outside_k: Tensor | None = None,
    ) -> Tensor:
        """The outputs of the next tokens; shapes as for ``attention``, any length.

        The first token's ``log_decay`` multiplies the state of the calls before.
        """
        own = {"input_gate": input_gate, "output_gate": output_gate, "log_decay": log_decay}
        own |= {"outside_q": outside_q, "outside_k": outside_k}
        options: dict[str, Any] = {"mask": mask, "state": self.state, **own, **self._parameters}
        out, self.state = attention(q, k, v, self.spec, return_state=True, **options)
        return out

    def __repr__(self) -> str:
        """One line, without the tensors."""
        return f"Stream({self.spec}, {self.tokens:,} tokens, {bytes_text(self.nbytes)})"

    @property
    def tokens(self) -> int:
        """Positions seen so far."""
        return 0 if self.state is None else int(self.state.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held between calls."""
        return 0 if self.state is None else self.state.nbytes
