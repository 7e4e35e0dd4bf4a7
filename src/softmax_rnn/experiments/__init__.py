"""Sets of runs: the side-by-side comparison."""

from softmax_rnn.experiments.compare import compare_configs, run_all

__all__ = ["compare_configs", "run_all"]
