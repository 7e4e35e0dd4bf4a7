"""Figure 4: linear attention beside softmax and its replacements (section 4.3)."""

from softmax_rnn.experiments.figures.figure2 import THREE
from softmax_rnn.experiments.plan import Experiment, Panel

LINEAR = ("linear_elu", "linear_relu", "linear_cosine")

EXPERIMENT = Experiment(
    name="figure4",
    title="Linear attention",
    panels=(Panel("linear attention", (*THREE, *LINEAR)),),
)
