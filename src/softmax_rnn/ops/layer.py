"""The attention layer: projections, rotary positions, gates and norm around ``attention()``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from softmax_rnn.ops.operation import attention
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State
from softmax_rnn.ops.variants import resolve


class Attention(nn.Module):
    """Multi-head attention of any spec, with Llama's parameter names plus the spec's own.

    A gate is one sigmoid scalar per head and token, ``sigmoid(Linear(hidden_size -> heads))``
    (appendix E); a learned length power is ``sigmoid(length_logit)`` per head; RMS and layer norms
    act over the head dimension with one weight shared by the heads. Specs add no other
    parameters; softmax adds none.

    Args:
        hidden_size: width of the residual stream.
        num_heads: query heads.
        spec: an :class:`AttentionSpec` or a variant's name.
        num_kv_heads: key/value heads; by default ``num_heads``.
        head_dim: width of a head; by default ``hidden_size // num_heads``.
        bias: whether the four projections have a bias.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        spec: AttentionSpec | str = "softmax",
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}.")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"The {num_kv_heads} key/value heads must divide the {num_heads} query heads."
            )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"The {num_heads} heads must divide the hidden size {hidden_size}.")
        self.spec = resolve(spec)
        self.head_dim = head_dim or hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.input_gate = nn.Linear(hidden_size, num_kv_heads) if self.spec.input_gate else None
        gated = self.spec.output_gate != "none"
        self.output_gate = nn.Linear(hidden_size, num_heads) if gated else None
        learned_length = self.spec.denominator == "learned_length"
        self.length_logit = nn.Parameter(torch.empty(num_heads)) if learned_length else None
        scaled, shifted = self.spec.norm in ("rms", "layer"), self.spec.norm == "layer"
        self.norm_weight = nn.Parameter(torch.empty(self.head_dim)) if scaled else None
        self.norm_bias = nn.Parameter(torch.empty(self.head_dim)) if shifted else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise parameters outside ``nn.Linear``: norms to 1 and 0, length logits to 0.5."""
        initial = ((self.norm_weight, 1.0), (self.norm_bias, 0.0), (self.length_logit, 0.5))
        for parameter, value in initial:
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def project(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project to rotated q [B, H, T, D], rotated k and (gated) v, both [B, Hkv, T, D].

        The input gate is applied here, so that a cache holds gated values.
        """
        heads_of = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(heads_of).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            # Autocast leaves the rotation in float32.
            q, k = (rotate(x, *position_embeddings).to(v.dtype) for x in (q, k))
        if self.input_gate is not None:
            gate = self.input_gate(hidden_states).sigmoid().transpose(1, 2)
            v = v * gate.unsqueeze(-1).to(v.dtype)
        return q, k, v

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Any:
        """Attend causally.

        Args:
            hidden_states: [B, T, hidden_size].
            mask: visible keys (True), broadcast to [B, H, T, T].
            position_embeddings: the rotary cosines and sines, each [B or 1, T, head_dim].
            state: the state of the earlier tokens, for a finite series.
            return_state: whether to return the state after these tokens as well.

        Returns:
            The output [B, T, hidden_size]; with ``return_state`` a pair of the output and the
            :class:`State`.
        """
        q, k, v = self.project(hidden_states, position_embeddings)
        options = {"mask": mask, "state": state, "return_state": return_state}
        result = self.attend(hidden_states, q, k, v, **options)
        return (self.merge(result[0]), result[1]) if return_state else self.merge(result)

    def attend(self, hidden_states: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """:func:`softmax_rnn.attention` of projected q, k, v, with this layer's parameters."""
        output_gate = None
        if self.output_gate is not None:
            output_gate = self.output_gate(hidden_states).sigmoid().transpose(1, 2)
        return attention(
            *(q, k, v),
            dataclasses.replace(self.spec, input_gate=False),  # project() has applied it
            output_gate=output_gate,
            length_power=None if self.length_logit is None else self.length_logit.sigmoid(),
            norm_weight=self.norm_weight,
            norm_bias=self.norm_bias,
            **options,
        )

    def merge(self, out: Tensor) -> Tensor:
        """Project the heads' outputs [B, H, T, D] to [B, T, hidden_size]."""
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        """The spec, in ``print(model)``."""
        return str(self.spec)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: rotate x [B, H, T, D] by angles, given as cosines and sines [B, T, D]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
