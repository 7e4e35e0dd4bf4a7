"""Sets of runs: comparisons, the figures of the paper, its claims."""
