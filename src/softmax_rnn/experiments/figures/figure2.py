"""Figure 2: the denominator replaced, on three corpora (section 4.1)."""

from softmax_rnn.experiments.plan import Experiment, Panel

THREE = ("softmax", "norm", "gate")

EXPERIMENT = Experiment(
    name="figure2",
    title="Softmax and its two replacements",
    panels=(
        Panel("The Pile", THREE, corpus="pile"),
        Panel("SlimPajama", THREE, corpus="slimpajama"),
        Panel("FineWeb", THREE, corpus="fineweb"),
    ),
)
