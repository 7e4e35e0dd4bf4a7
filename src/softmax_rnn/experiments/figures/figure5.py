"""Figure 5: the loss against the highest power kept (section 4.4, appendix F)."""

from softmax_rnn.experiments.plan import Experiment, Panel

# The paper has every power to 10; the curves are smooth, and each point is a run.
ORDERS = (0, 1, 2, 3, 4, 6, 10)
SERIES = ("taylor", "taylor_elu", "taylor_relu", "taylor_cosine")

EXPERIMENT = Experiment(
    name="figure5",
    title="Powers of the Taylor series",
    panels=(
        Panel("softmax", ("softmax",)),
        *(Panel(series, tuple(f"{series}:{order}" for order in ORDERS)) for series in SERIES),
    ),
    kind="orders",
)
