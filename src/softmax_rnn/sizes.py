"""The sizes of models by name: plain data, which the command line reads without transformers."""

from __future__ import annotations

# The paper's sizes (appendix D; `deep` is in the authors' code alone) and one for a laptop.
_COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TABLE = {
    "demo": (128, 256, 4, 4),
    "small": (1024, 2048, 20, 16),
    "large": (3072, 6144, 20, 16),
    "deep": (1024, 2048, 60, 32),
}
#: A model's sizes by name: ``demo``, and the paper's ``small``, ``large`` and ``deep``.
SIZES = {name: dict(zip(_COLUMNS, row, strict=True)) for name, row in _TABLE.items()}
