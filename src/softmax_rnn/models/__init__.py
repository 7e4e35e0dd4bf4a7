"""A Hugging Face Llama whose attention is any spec of this package, and converted models.

Importing this module registers both with transformers' Auto classes.
"""

from softmax_rnn._utils.errors import missing_extra

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_extra("hf", "softmax_rnn.models", error) from error

from softmax_rnn.conversion.convert import convert, modules_to_save
from softmax_rnn.conversion.llama import from_llama
from softmax_rnn.models.cache import RecurrentCache
from softmax_rnn.models.configuration import SoftmaxRNNConfig
from softmax_rnn.models.initialization import initialize
from softmax_rnn.models.modeling import (
    SoftmaxRNNForCausalLM,
    SoftmaxRNNForMaskedLM,
    SoftmaxRNNForSequenceClassification,
    SoftmaxRNNModel,
)
from softmax_rnn.sizes import SIZES

__all__ = [
    "SIZES",
    "RecurrentCache",
    "SoftmaxRNNConfig",
    "SoftmaxRNNForCausalLM",
    "SoftmaxRNNForMaskedLM",
    "SoftmaxRNNForSequenceClassification",
    "SoftmaxRNNModel",
    "convert",
    "from_llama",
    "initialize",
    "modules_to_save",
]
