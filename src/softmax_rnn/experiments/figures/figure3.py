"""Figure 3: a larger model, and a longer sequence (section 4.2)."""

from softmax_rnn.experiments.figures.figure2 import THREE
from softmax_rnn.experiments.plan import Experiment, Panel

EXPERIMENT = Experiment(
    name="figure3",
    title="Scaling the model and the sequence",
    panels=(
        Panel("larger model", THREE, condition="large"),
        Panel("longer sequence", THREE, condition="long"),
    ),
)
