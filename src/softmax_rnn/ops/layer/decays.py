"""How a layer computes the log decays of its keys."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softmax_rnn.ops.forms.row_sums import compute_dtype
from softmax_rnn.ops.layer.parts import LayerPart
from softmax_rnn.ops.options import LayerOptions
from softmax_rnn.ops.spec import AttentionSpec

# GLA: the rank of the projection, and what its log decays are divided by.
_RANK = 16
_GLA_DIVISOR = 16.0


class LayerDecay(LayerPart):
    """The log decays of tokens, for ``kv_heads`` heads with keys of ``width``.

    Subclasses define ``forward``. It takes hidden states [B, T, hidden_size]. It returns log decays
    <= 0, [Hkv], [B, Hkv, T] or [B, Hkv, T, width], and a gate of values [B, Hkv, T] or ``None``.
    """

    def __init__(self, hidden_size: int, kv_heads: int, width: int) -> None:
        super().__init__()


class RetentionDecay(LayerDecay):
    """RetNet's: head ``h`` keeps ``1 - 2^(-5-h)`` of its state at each token; not learned."""

    def __init__(self, hidden_size: int, kv_heads: int, width: int) -> None:
        super().__init__(hidden_size, kv_heads, width)
        self.kv_heads = kv_heads

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """The same for every token: [Hkv]."""
        # Computed here, as a buffer would be rounded with a model in half precision.
        dtype = compute_dtype(hidden_states.dtype)
        heads = torch.arange(self.kv_heads, dtype=dtype, device=hidden_states.device)
        return torch.log1p(-(2.0 ** (-5 - heads))), None


class ForgetGate(LayerDecay):
    """The forgetting transformer's: ``log sigmoid(w_h . x + b_h)``.

    The biases start with decays as in RetNet: heads keep ``1 - 1/32`` to ``1 - 1/512``.
    """

    def __init__(self, hidden_size: int, kv_heads: int, width: int) -> None:
        super().__init__(hidden_size, kv_heads, width)
        self.proj = nn.Linear(hidden_size, kv_heads, bias=False)
        self.bias = nn.Parameter(torch.empty(kv_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the biases."""
        with torch.no_grad():
            self.bias.copy_((torch.linspace(5, 9, len(self.bias)).exp2() - 1).log())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """One per token and head: [B, Hkv, T]."""
        return F.logsigmoid(_precise(self.proj(hidden_states)) + self.bias).transpose(1, 2), None


class TimeStep(LayerDecay):
    """Mamba-2's: ``-exp(A_h) * dt`` with the time step ``dt = softplus(w_h . x + b_h)``.

    ``dt`` is a gate of values as well. It starts between 0.001 and 0.1, ``exp(A_h)`` between 1 and
    16.
    """

    def __init__(self, hidden_size: int, kv_heads: int, width: int) -> None:
        super().__init__(hidden_size, kv_heads, width)
        self.proj = nn.Linear(hidden_size, kv_heads, bias=False)
        self.bias = nn.Parameter(torch.empty(kv_heads))
        self.log_rate = nn.Parameter(torch.empty(kv_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw biases and rates."""
        with torch.no_grad():
            self.log_rate.uniform_(1, 16).log_()
            # The inverse of softplus, of a time step that is uniform on a logarithmic scale.
            self.bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_().expm1_().log_()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Both per token and head: [B, Hkv, T]."""
        step = F.softplus(_precise(self.proj(hidden_states)) + self.bias).transpose(1, 2)
        return -self.log_rate.exp().unsqueeze(-1) * step, step


class SoftplusDecay(LayerDecay):
    """2Mamba's: ``-softplus(w_h . x)``, without a bias."""

    def __init__(self, hidden_size: int, kv_heads: int, width: int) -> None:
        super().__init__(hidden_size, kv_heads, width)
        self.proj = nn.Linear(hidden_size, kv_heads, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """One per token and head: [B, Hkv, T]."""
        return -F.softplus(_precise(self.proj(hidden_states))).transpose(1, 2), None


class ChannelDecay(LayerDecay):
    """GLA's: ``log sigmoid(W_2 W_1 x + b) / 16``, with ``W_1`` of rank 16."""

    def __init__(self, hidden_size: int, kv_heads: int, width: int) -> None:
        super().__init__(hidden_size, kv_heads, width)
        self.width = width
        self.down = nn.Linear(hidden_size, _RANK, bias=False)
        self.up = nn.Linear(_RANK, kv_heads * width)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """One per token, head and channel of the key: [B, Hkv, T, width]."""
        gates = _precise(self.up(self.down(hidden_states))).unflatten(-1, (-1, self.width))
        return F.logsigmoid(gates).transpose(1, 2) / _GLA_DIVISOR, None


# By the rule of the layer's options and the decay of the spec.
_DECAYS: dict[tuple[str, str], type[LayerDecay]] = {
    ("standard", "head"): RetentionDecay,
    ("standard", "token"): ForgetGate,
    ("standard", "channel"): ChannelDecay,
    ("time_step", "token"): TimeStep,
    ("softplus", "token"): SoftplusDecay,
}


def decay_of(spec: AttentionSpec, options: LayerOptions) -> type[LayerDecay] | None:
    """The class for a spec and options; ``None`` without a decay.

    Raises:
        ValueError: for a rule that does not compute the spec's decay.
    """
    if (spec.decay, options.decay_rule) == ("none", "standard"):
        return None
    found = _DECAYS.get((options.decay_rule, spec.decay))
    if found is None:
        needed = " or ".join(repr(decay) for rule, decay in _DECAYS if rule == options.decay_rule)
        raise ValueError(
            f"decay_rule={options.decay_rule!r} needs the decay {needed}, not {spec.decay!r}."
        )
    return found


def _precise(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x.dtype))
