"""What a conversion's runs minimise: modules that compute a share of the loss of a batch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from softmax_rnn.conversion.layer import Attending, as_source, converted_layers, substituted
from softmax_rnn.conversion.lora import without_lora
from softmax_rnn.data.rows import IGNORED


class AttentionTransfer(nn.Module):
    """How far each converted layer is from the source's attention, on the source's inputs.

    Of each row, layer and head: the squared error of the output over that of zeros; then means.
    One pass through the source's layers gives all errors, since every layer hands on the output of
    softmax (attention transfer of LoLCATs, Zhang et al., 2024).

    Args:
        model: a converted model.
        rows: those of a whole batch.
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(self, predicted: int, **batch: Tensor) -> Tensor:
        """The loss of these rows."""
        batch.pop("labels")
        shown = batch.get("attention_mask")
        errors: list[Tensor] = []

        def compare(what: Attending) -> Tensor:
            with torch.no_grad():
                expected = what.source()
            errors.append(relative_errors(what.converted(), expected, shown).mean(1))
            return expected

        with substituted(self.model, compare):
            self.model.base_model(**batch, use_cache=False)
        return torch.stack(errors).mean(0).sum() / self.rows


class Distillation(nn.Module):
    """The cross-entropy of the next token, mixed with the divergence from the source's prediction.

    The source is the same model with softmax attention and without LoRA's additions.

    Args:
        model: a converted model.
        share: of the divergence.
        whole: whether all weights are trained: then the source is in a copy of the model.
        window_dropout: the largest probability of a layer to do without its window. That of a batch
            is drawn between 0 and this times ``left``, the share of the run that is still to come.
    """

    left = 1.0

    def __init__(
        self, model: PreTrainedModel, share: float, whole: bool, window_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.model, self.share, self.window_dropout = model, share, window_dropout
        # In a list, so that it is no part of this module.
        copied = share > 0 and whole
        self.copies = [copy.deepcopy(model).requires_grad_(False)] if copied else []

    def forward(self, predicted: int, **batch: Tensor) -> Tensor:
        """The loss of these rows; ``predicted`` tokens are predicted in the whole batch."""
        labels = batch.pop("labels")[:, 1:].flatten()
        if self.window_dropout:
            self._drop_windows(batch["input_ids"])
        logits = self._logits(self.model, batch)
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if self.share:
            with torch.no_grad():
                expected = self._source_logits(batch).log_softmax(-1)[labels != IGNORED]
            found = logits[labels != IGNORED].log_softmax(-1)
            divergence = F.kl_div(found, expected, reduction="sum", log_target=True)
            loss = (1 - self.share) * loss + self.share * divergence
        return loss / predicted

    def _drop_windows(self, ids: Tensor) -> None:
        """Draw which layers do without their window; for the same tokens it is the same draw.

        So a run that is resumed goes on as it would have gone on.
        """
        numbers = torch.Generator().manual_seed(int(ids.sum()))
        most = self.window_dropout * self.left * float(torch.rand((), generator=numbers))
        for layer in converted_layers(self.model):
            if layer.spec.outside == "series":
                layer.window_dropped = float(torch.rand((), generator=numbers)) < most

    def _logits(self, model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1).float()

    def _source_logits(self, batch: dict[str, Tensor]) -> Tensor:
        if self.copies:
            with substituted(self.copies[0], as_source):
                return self._logits(self.copies[0], batch)
        with substituted(self.model, as_source), without_lora(self.model):
            return self._logits(self.model, batch)


def relative_errors(found: Tensor, expected: Tensor, shown: Tensor | None = None) -> Tensor:
    """The squared error of outputs over their squares, per row and head: [B, T, H, E] to [B, H].

    ``shown`` [B, T] is 0 at padding, which does not count.
    """
    squares = torch.stack((found - expected, expected)).float().square().sum(-1)
    if shown is not None:
        squares = squares.masked_fill(shown[..., None] == 0, 0.0)
    error, size = squares.sum(2)
    return error / size.clamp(min=torch.finfo(size.dtype).tiny)
