"""Which powers of exp's series the heads of a trained model use."""

from softmax_rnn.analysis.analyze import Analysis, analyze, analyze_checkpoint, write
from softmax_rnn.analysis.figure import draw

__all__ = ["Analysis", "analyze", "analyze_checkpoint", "draw", "write"]
