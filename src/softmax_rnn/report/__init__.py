"""What runs have shown: a table with intervals, a figure, an HTML page."""

from softmax_rnn.report.report import find_runs, report

__all__ = ["find_runs", "report"]
