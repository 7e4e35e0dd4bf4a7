"""The loss of every token of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softmax_rnn.data.rows import IGNORED
from softmax_rnn.training.config import Precision


class TokenLosses(NamedTuple):
    """The predictions of N rows of T tokens; each tensor [N, T - 1] leaves out a row's first token.

    With labels that are shifted already, each is [N, T].

    Attributes:
        losses: minus the log-likelihood of the token, in nats; 0 where ``predicted`` is false.
        right: whether the token is the likeliest one; false where ``predicted`` is false.
        predicted: false for tokens without a label, such as padding.
    """

    losses: Tensor
    right: Tensor
    predicted: Tensor


@torch.no_grad()
def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> TokenLosses:
    """The loss of every token of a batch, in float32.

    Args:
        model: a causal language model in evaluation mode.
        batch: ``input_ids`` and ``labels`` [N, T], and ``attention_mask`` if there is padding; or
            ``shift_labels`` [N, T], the labels of the next tokens.
    """
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
    labels = batch.get("shift_labels")
    logits = model(**inputs, use_cache=False).logits
    if labels is None:
        labels, logits = batch["labels"][:, 1:], logits[:, :-1]
    logits = logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return TokenLosses(losses, logits.argmax(-1) == labels, labels != IGNORED)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which a run with this ``precision`` calls its model."""
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)
