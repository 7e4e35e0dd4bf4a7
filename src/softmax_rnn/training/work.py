"""The progress of a run: training and evaluations, in one bar."""

from __future__ import annotations

from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn.training.config import TrainingConfig

_TRAINING = 3.0  # the work of a row in training, where that in an evaluation is 1


class RunBar(ProgressBar):
    """The bar of a run: its whole is the work of all steps and evaluations.

    So the time that is left includes evaluations that are still to come.

    Args:
        label: the run's name.
        config: its settings.
        test_rows: number of rows of the test split, each counted as one of ``block_size`` tokens.
        step: number of steps that were taken before.
        visible: whether to show anything.
    """

    def __init__(
        self, label: str, config: TrainingConfig, test_rows: float, step: int, *, visible: bool
    ) -> None:
        self._of_step, self._of_test = _TRAINING * config.batch_size, test_rows
        self._steps, self._every = config.steps, config.evaluate_every
        super().__init__(label, self._work(config.steps, 1.0), self._work(step), visible=visible)

    def trained(self, step: int, text: str) -> None:
        """So many steps are taken."""
        self.update(self._work(step), f"step {step:,} of {self._steps:,} {text}".rstrip())

    def tested(self, step: int, share: float, text: str = "evaluating") -> None:
        """Of the evaluation after ``step``, so much is done."""
        self.update(self._work(step, share), f"step {step:,} of {self._steps:,} {text}")

    def _work(self, step: int, tested: float = 0.0) -> float:
        before = max(step - 1, 0) // self._every  # evaluations
        return self._of_step * step + self._of_test * (before + tested)
