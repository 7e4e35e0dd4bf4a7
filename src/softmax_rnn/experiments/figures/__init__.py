"""The paper's figures, a file each: which variants were trained side by side, and where."""

from softmax_rnn.experiments.figures import (
    figure2,
    figure3,
    figure4,
    figure5,
    figure6,
    figure8,
    figure9,
)
from softmax_rnn.experiments.plan import Experiment

FIGURES: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (figure2, figure3, figure4, figure5, figure6, figure8, figure9)
}

__all__ = ["FIGURES"]
