"""One training run: its configuration, its folder, its trainer."""

from softmax_rnn.training.config import PRESETS, RunConfig
from softmax_rnn.training.run import train

__all__ = ["PRESETS", "RunConfig", "train"]
