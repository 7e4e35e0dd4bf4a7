"""What every part of an attention layer shares, and the short convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softmax_rnn.ops.context_parallel import previous_tail
from softmax_rnn.ops.padding import hidden_first, taken


class LayerPart(nn.Module):
    """A module that sets the initial values of its own parameters and buffers.

    Parameters of an ``nn.Linear`` inside it are not its own: they start as in every ``nn.Linear``.
    """

    def reset_parameters(self) -> None:
        """Set the initial values of this module's own parameters and buffers, if it has any."""


class ShortConvolution(LayerPart):
    """A causal convolution of each channel, ``y_t = sum_i kernel_i x_{t - width + 1 + i}``.

    It starts as the identity: ``y_t = x_t``. With ``bias``, each channel adds a number, at first 0.
    """

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the factor of the newest token to 1, the others and the bias to 0."""
        newest = torch.zeros(self.kernel.shape[1])
        newest[-1] = 1.0
        with torch.no_grad():
            self.kernel.copy_(newest)
            if self.bias is not None:
                self.bias.zero_()

    def forward(
        self, x: Tensor, shown: Tensor | None, earlier: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, C].

        Args:
            x: the new tokens.
            shown: [B or 1, T], False for hidden tokens: they come before all others, as zeros.
            earlier: the last tokens before them [B, width - 1, C]; by default zeros.

        Returns:
            The result [B, T, C], and the earlier and new tokens as they came, hidden ones as zeros,
            [B, width - 1 + T, C], of which :func:`last_inputs` are for the next call.
        """
        x = _visible(x, shown)
        if earlier is None:
            earlier = x.new_zeros(x.shape[0], self.kernel.shape[1] - 1, x.shape[-1])
        inputs = torch.cat((earlier.to(x.dtype), x), dim=1)
        kernel = self.kernel.to(x.dtype).unsqueeze(1)
        if not x.numel():  # convolutions need an output
            return x, inputs
        order = _order(inputs, shown, x.shape[1])
        padded = inputs if order is None else taken(inputs, order, dim=1)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = F.conv1d(padded.mT, kernel, bias, groups=len(kernel)).mT
        if order is not None:
            before = earlier.shape[1]
            out = taken(out, (order.argsort(dim=1)[:, before:] - before).clamp(min=0), dim=1)
        return out, inputs

    def before(self, x: Tensor, shown: Tensor | None, group: Any) -> Tensor:
        """The tokens before x, of the process before this one in ``group``."""
        return previous_tail(_visible(x, shown), self.kernel.shape[1] - 1, group)


def last_inputs(inputs: Tensor, shown: Tensor | None, tokens: int) -> Tensor:
    """The last inputs of a convolution, [B, width - 1, C], visible ones after hidden ones.

    Args:
        inputs: of the earlier and the new tokens, [B, width - 1 + T, C].
        shown: which of the new tokens are visible, [B or 1, T].
        tokens: T.
    """
    order = _order(inputs, shown, tokens)
    inputs = inputs if order is None else taken(inputs, order, dim=1)
    return inputs[:, tokens:].clone()


def _order(inputs: Tensor, shown: Tensor | None, tokens: int) -> Tensor | None:
    """The order of inputs [B, width - 1 + T, C] in which hidden tokens come before all others."""
    if shown is None:
        return None
    rows = inputs.shape[0]
    known = shown.new_ones(rows, inputs.shape[1] - tokens)
    return hidden_first(torch.cat((known, shown.expand(rows, tokens)), dim=1))


def _visible(x: Tensor, shown: Tensor | None) -> Tensor:
    return x if shown is None else x.masked_fill(~shown.unsqueeze(-1), 0.0)
