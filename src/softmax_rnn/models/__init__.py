"""A Hugging Face Llama whose attention is any spec of this package."""

from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.models.configuration import SIZES, SoftmaxRNNConfig
from softmax_rnn.models.conversion import from_llama
from softmax_rnn.models.initialization import initialize
from softmax_rnn.models.modeling import SoftmaxRNNForCausalLM, SoftmaxRNNModel

__all__ = [
    "SIZES",
    "RecurrentCache",
    "SoftmaxRNNConfig",
    "SoftmaxRNNForCausalLM",
    "SoftmaxRNNModel",
    "from_llama",
    "initialize",
]
