"""The attention layer with transformers' masks."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from softmax_rnn import SoftmaxRNNConfig, SoftmaxRNNForCausalLM
from softmax_rnn.models.attention import LlamaAttention
from softmax_rnn.ops import attention as operation


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


@pytest.mark.parametrize("name", ["softmax", "norm", "forgetting"])
def test_a_decoded_token_of_softmax_is_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of softmax alone, and not with a mask: the result is that of the whole sequence."""
    torch.manual_seed(0)
    config = SoftmaxRNNConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attention=name,
    )  # fmt: skip
    model = SoftmaxRNNForCausalLM(config).double().eval()
    ids, general = torch.randint(11, (2, 9)), []
    in_steps = operation._in_steps
    monkeypatch.setattr(operation, "_in_steps", lambda *x: general.append(1) or in_steps(*x))
    for shown in (torch.ones(2, 9), torch.tensor([[0] * 2 + [1] * 7, [1] * 9])):
        with torch.no_grad():
            expected = model(ids, attention_mask=shown, use_cache=False).logits[:, -1]
            cache = DynamicCache(config=config)
            model(ids[:, :8], attention_mask=shown[:, :8], past_key_values=cache)
            general.clear()
            found = model(ids[:, 8:], attention_mask=shown, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(found, expected)
        assert len(general) == (0 if name == "softmax" and shown.all() else 2)
