"""What a layer keeps of earlier tokens."""

from __future__ import annotations

from typing import Any

import pytest

from softmax_rnn import state_size
from softmax_rnn.report.memory import layer_memory
from softmax_rnn.training import RunConfig

CACHE = 2 * 128 * 256 * 4  # keys and values of 4 heads of width 32, for 256 tokens


@pytest.mark.parametrize(
    ("attention", "size", "kind"),
    [
        ("softmax", CACHE, "cache"),
        ("norm", CACHE, "cache"),
        ("gate", CACHE, "cache"),
        ("relu_gate", CACHE, "cache"),  # a clamped score is not an inner product
        ("linear_elu", 4 * 32 * 33 * 4, "state"),
        ("quadratic", 4 * 528 * 32 * 4, "state"),
        ("taylor:2", 4 * state_size("taylor:2", 32, 32) * 4, "state"),
        ({"decay": "head"}, CACHE, "cache"),
        ({"decay": "token"}, CACHE + 4 * 256 * 4, "cache"),
        ({"decay": "channel"}, CACHE * 3 // 2, "cache"),
        ({"series": "power", "order": 1, "decay": "token"}, 4 * 32 * 33 * 4, "state"),
        ({"window": 60, "global_keys": 4}, CACHE // 4, "window"),
        ({"window": 1000}, CACHE, "window"),
        ({"series": "taylor", "order": 1, "window": 64}, CACHE // 4, "window"),
        (
            {"series": "taylor", "order": 1, "window": 64, "outside": "series"},
            CACHE // 4 + 4 * 33 * 33 * 4,
            "state and window",
        ),
        (
            {
                **{"series": "taylor", "order": 1, "window": 60},
                "global_keys": 4,
                "outside": "series",
            },
            CACHE // 4 + 4 * 33 * 33 * 4,
            "state and window",
        ),
        # Twice as many features as channels, which recent keys have besides.
        ("lolcats:64", CACHE // 4 + 4 * 64 * 64 * 4 + 4 * 64 * 33 * 4, "state and window"),
    ],
)
def test_the_size_of_what_is_kept(attention: str | dict[str, Any], size: int, kind: str) -> None:
    memory = layer_memory(RunConfig(attention=attention))
    assert memory == (size, kind)
    longer = layer_memory(RunConfig(attention=attention, block_size=2048))
    assert memory.grows == (longer.size == 8 * size)


def test_shared_keys_are_kept_once() -> None:
    memory = layer_memory(RunConfig(num_kv_heads=2, num_layers=7, seed=3))
    assert memory == (CACHE // 2, "cache")
    assert str(memory) == "128.0 KiB cache"


def test_a_layer_that_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="No layer can have these sizes"):
        layer_memory(RunConfig(hidden_size=2**50, intermediate_size=2**50))
