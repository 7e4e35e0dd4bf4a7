"""Softmax attention as a sum of RNNs: one specification, several exact forms, fair comparison."""

from softmax_rnn.attention import attention, forms
from softmax_rnn.models import SoftmaxRNNConfig, SoftmaxRNNForCausalLM
from softmax_rnn.series import remainder_bound
from softmax_rnn.spec import AttentionSpec
from softmax_rnn.variants import variant, variants
from softmax_rnn.version import __version__

__all__ = [
    "AttentionSpec",
    "SoftmaxRNNConfig",
    "SoftmaxRNNForCausalLM",
    "__version__",
    "attention",
    "forms",
    "remainder_bound",
    "variant",
    "variants",
]
