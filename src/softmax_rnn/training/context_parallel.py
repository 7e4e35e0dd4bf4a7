"""Rows that several processes share: each has an equal part of their positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, distributed
from transformers import PreTrainedModel

from softmax_rnn.data.rows import IGNORED
from softmax_rnn.ops import AttentionCore
from softmax_rnn.training.config import ConversionConfig, TrainingConfig


@dataclass(frozen=True)
class ContextParallel:
    """The place of a process among those of a run.

    Attributes:
        size: the processes of a team, which share rows.
        place: which part of the rows this process has.
        teams: the number of teams.
        team: that of this process.
    """

    size: int
    place: int
    teams: int
    team: int

    @classmethod
    def of(
        cls, model: PreTrainedModel, config: TrainingConfig, accelerator: Accelerator
    ) -> ContextParallel:
        """The place of this process; the model's attention gets the group of its team.

        Raises:
            ValueError: if the processes cannot be divided, or the run cannot share rows.
        """
        size, processes = config.context_parallel, accelerator.num_processes
        teams, rest = divmod(processes, size)
        if rest:
            raise ValueError(
                f"context_parallel={size} must divide the number of processes, which is "
                f"{processes}: start them with torchrun --nproc-per-node."
            )
        if size > 1 and (config.compile is True or isinstance(config, ConversionConfig)):
            what = "compile=true" if config.compile is True else "a conversion"
            raise ValueError(f"context_parallel={size} does not work with {what}.")
        team, place = divmod(accelerator.process_index, size)
        if size > 1:
            groups = [
                distributed.new_group(range(first, first + size))
                for first in range(0, processes, size)
            ]
            for module in model.modules():
                if isinstance(module, AttentionCore):
                    module.context_group = groups[team]
        return cls(size, place, teams, team)

    def own(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """This process's part of a batch of rows [N, T], for the model.

        Its labels are shifted before they are divided: the last token of a part predicts the first
        one of the next.
        """
        if self.size == 1:
            return batch
        length = batch["input_ids"].shape[1]
        if length % self.size:
            raise ValueError(f"context_parallel={self.size} must divide the rows of {length}.")
        part = length // self.size
        mine = slice(self.place * part, (self.place + 1) * part)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        own = {name: x[:, mine].contiguous() for name, x in {**batch, "labels": labels}.items()}
        positions = torch.arange(length, device=labels.device)[None, mine]
        shifted = {"shift_labels": own["labels"], "position_ids": positions.expand(len(labels), -1)}
        return own | shifted
