"""The attention layer with transformers' masks."""

from __future__ import annotations

import pytest
import torch

from softmax_rnn.models.attention import LlamaAttention


def test_an_additive_mask_is_read_as_a_boolean_one() -> None:
    layer, x = LlamaAttention(32, 4, layer_idx=0), torch.randn(1, 6, 32)
    shown = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    shown[..., 0] = False
    additive = torch.zeros(1, 1, 6, 6).masked_fill(~shown, torch.finfo(torch.float32).min)
    expected, _ = layer(x, attention_mask=shown)
    torch.testing.assert_close(layer(x, attention_mask=additive)[0], expected)


def test_masks_that_could_be_read_two_ways_are_refused() -> None:
    layer = LlamaAttention(16, 2, layer_idx=0)
    x = torch.zeros(2, 6, 16)
    for mask in (torch.ones(2, 1, 6, 6, dtype=torch.long), torch.ones(6, 6, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"attention_mask must be \[B, 1, T or 1, S\]"):
            layer(x, attention_mask=mask)
