"""Figure 8: figure 2, drawn larger (appendix G)."""

from dataclasses import replace

from softmax_rnn.experiments.figures import figure2

EXPERIMENT = replace(figure2.EXPERIMENT, name="figure8", large=True)
