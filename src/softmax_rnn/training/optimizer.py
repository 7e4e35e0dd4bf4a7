"""The optimizer of a run."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW

from softmax_rnn.training.config import TrainingConfig


def adamw(model: nn.Module, config: TrainingConfig) -> AdamW:
    """AdamW, without weight decay on biases and the norms of the residual stream."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    trained = ((name, x) for name, x in model.named_parameters() if x.requires_grad)
    for name, parameter in trained:
        exempt = "bias" in name or "layernorm" in name or name == "model.norm.weight"
        (others if exempt else decayed).append(parameter)
    return AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
