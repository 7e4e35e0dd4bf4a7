"""Figure 6: ablations of the denominator, the gate and the norm (section 4.5)."""

from softmax_rnn.experiments.plan import Experiment, Panel

DENOMINATORS = (
    "softmax",
    "detached",
    "clamped",
    "length",
    "detached_gate",
    "gate_only",
    "gate",
)
GATES = ("softmax", "gate_only", "gate", "input_gate", "both_gates", "relu_gate", "length")
NORMS = (
    "softmax",
    "norm",
    "norm_l2_clamped",
    "norm_l2_length",
    "norm_rms",
    "norm_rms_length",
    "norm_layer_length",
    "norm_relu",
)

EXPERIMENT = Experiment(
    name="figure6",
    title="Ablations",
    panels=(
        Panel("denominator", DENOMINATORS),
        Panel("gate", GATES),
        Panel("norm", NORMS),
    ),
)
