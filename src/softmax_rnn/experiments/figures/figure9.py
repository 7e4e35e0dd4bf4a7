"""Figure 9: figure 6, drawn larger (appendix G)."""

from dataclasses import replace

from softmax_rnn.experiments.figures import figure6

EXPERIMENT = replace(figure6.EXPERIMENT, name="figure9", large=True)
