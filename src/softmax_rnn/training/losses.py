"""The loss of every token of a batch, and what a run minimises."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from softmax_rnn.conversion.objectives import AttentionTransfer, Distillation
from softmax_rnn.data.rows import IGNORED
from softmax_rnn.training.config import ConversionConfig, Precision, TrainingConfig


class TokenLosses(NamedTuple):
    """The predictions of N rows of T tokens; each tensor [N, T - 1] leaves out a row's first token.

    With labels that are shifted already, and of an encoder, each is [N, T].

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
        model: a language model in evaluation mode, causal or an encoder, whose labels are of the
            tokens in their places.
        batch: ``input_ids`` and ``labels`` [N, T], and ``attention_mask`` if there is padding; or
            ``shift_labels`` [N, T], the labels of the next tokens.
    """
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
    labels = batch.get("shift_labels")
    logits = model(**inputs, use_cache=False).logits
    if not getattr(model.config, "is_causal", True):
        labels = batch["labels"]
    elif labels is None:
        labels, logits = batch["labels"][:, 1:], logits[:, :-1]
    logits = logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return TokenLosses(losses, logits.argmax(-1) == labels, labels != IGNORED)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which a run with this ``precision`` calls its model."""
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


class NextToken(nn.Module):
    """The cross-entropy of the next token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, predicted: int, **batch: Tensor) -> Tensor:
        """The loss of these rows; ``predicted`` tokens are predicted in the whole batch."""
        return self.model(**batch, use_cache=False, num_items_in_batch=predicted).loss


def objective(model: PreTrainedModel, config: TrainingConfig) -> nn.Module:
    """The module that computes what a run minimises, of a batch's rows: their share of the mean."""
    if not isinstance(config, ConversionConfig):
        return NextToken(model)
    if config.objective == "transfer":
        return AttentionTransfer(model, config.batch_size)
    whole, dropout = not config.lora_rank, config.window_dropout
    return Distillation(model, config.distillation, whole, dropout)
