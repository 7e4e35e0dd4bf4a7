"""Softmax attention as a sum of RNNs: one specification, several exact forms, fair comparison."""

from softmax_rnn.attention import attention
from softmax_rnn.cache import RecurrentCache
from softmax_rnn.cost import crossover
from softmax_rnn.dispatch import forms
from softmax_rnn.models import SoftmaxRNNConfig, SoftmaxRNNForCausalLM
from softmax_rnn.series import order_for, remainder_bound
from softmax_rnn.spec import AttentionSpec
from softmax_rnn.state import State
from softmax_rnn.stream import Stream
from softmax_rnn.symmetric import state_size
from softmax_rnn.variants import variant, variants
from softmax_rnn.version import __version__

__all__ = [
    "AttentionSpec",
    "RecurrentCache",
    "SoftmaxRNNConfig",
    "SoftmaxRNNForCausalLM",
    "State",
    "Stream",
    "__version__",
    "attention",
    "crossover",
    "forms",
    "order_for",
    "remainder_bound",
    "state_size",
    "variant",
    "variants",
]
