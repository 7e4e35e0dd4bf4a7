"""Softmax attention as a sum of RNNs: one specification, several exact forms, fair comparison.

The names of the operation are imported at once; they need only torch and numpy. The names that need
Hugging Face's transformers are imported on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from softmax_rnn.ops.attention import attention
from softmax_rnn.ops.context_parallel import context_parallel_attention
from softmax_rnn.ops.fitting import fit_series
from softmax_rnn.ops.layer.attention import Attention
from softmax_rnn.ops.monomials import state_size
from softmax_rnn.ops.options import LayerOptions
from softmax_rnn.ops.plan import explain, forms
from softmax_rnn.ops.series import order_for, remainder_bound
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.state import State
from softmax_rnn.ops.stream import Stream
from softmax_rnn.ops.variants import layer_options, register_variant, variant, variants
from softmax_rnn.ops.work import crossover

if TYPE_CHECKING:
    from softmax_rnn.models import (
        RecurrentCache,
        SoftmaxRNNConfig,
        SoftmaxRNNForCausalLM,
        SoftmaxRNNForMaskedLM,
        SoftmaxRNNForSequenceClassification,
        convert,
        from_llama,
        modules_to_save,
    )

__version__ = "0.2.0"
__all__ = [
    "Attention",
    "AttentionSpec",
    "LayerOptions",
    "RecurrentCache",
    "SoftmaxRNNConfig",
    "SoftmaxRNNForCausalLM",
    "SoftmaxRNNForMaskedLM",
    "SoftmaxRNNForSequenceClassification",
    "State",
    "Stream",
    "__version__",
    "attention",
    "context_parallel_attention",
    "convert",
    "crossover",
    "explain",
    "fit_series",
    "forms",
    "from_llama",
    "layer_options",
    "modules_to_save",
    "order_for",
    "register_variant",
    "remainder_bound",
    "state_size",
    "variant",
    "variants",
]
_MODEL_NAMES = (
    *("RecurrentCache", "SoftmaxRNNConfig", "SoftmaxRNNForCausalLM", "SoftmaxRNNForMaskedLM"),
    "SoftmaxRNNForSequenceClassification",
    *("convert", "from_llama", "modules_to_save"),
)


def __getattr__(name: str) -> Any:
    if name not in _MODEL_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("softmax_rnn.models"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
