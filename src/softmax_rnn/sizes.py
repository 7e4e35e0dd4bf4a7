"""The sizes of models by name: plain data, which the command line reads without transformers."""

from __future__ import annotations

# The paper's sizes (appendix D; `deep` is in the authors' code alone) and one for a laptop.
SIZES: dict[str, dict[str, int]] = {
    "demo": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
    },
    "large": {
        "hidden_size": 3072,
        "intermediate_size": 6144,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
    },
    "deep": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
    },
}
