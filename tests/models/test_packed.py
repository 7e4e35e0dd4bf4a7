"""Sequences packed into one row, as transformers' collators hand them over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.models.masks import segments_shown
from test_modeling import HYBRID, NAMES, build

LENGTHS = [7, 1, 12, 5]
IDS = torch.randint(0, 61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
# What tells a model where sequences begin.
GIVEN: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": POSITIONS},
    "bounds": {"position_ids": POSITIONS, "cu_seq_lens_q": BOUNDS},
}


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    weights = dict(model.named_parameters())
    upstream = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    found = torch.autograd.grad(logits, weights.values(), upstream, materialize_grads=True)
    return dict(zip(weights, found, strict=True))


@pytest.mark.parametrize("attention", [*NAMES, "2mamba", "hybrid"])
def test_each_is_what_it_is_alone(attention: str) -> None:
    model = (build(**HYBRID) if attention == "hybrid" else build(attention)).double()
    parts = [model(part, use_cache=False).logits for part in IDS.split(LENGTHS, dim=1)]
    alone = torch.cat(parts, dim=1)
    expected = gradients(model, alone)
    for given in GIVEN.values():
        found = model(IDS, use_cache=False, **given).logits
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)
        for weight, x in gradients(model, found).items():
            torch.testing.assert_close(x, expected[weight], rtol=1e-8, atol=1e-8, msg=weight)


def test_full_masks_of_callers() -> None:
    """Causal, and additive, as for any model of transformers."""
    model = build("window_taylor:2")
    alone = torch.cat([model(x, use_cache=False).logits for x in IDS.split(LENGTHS, 1)], 1)
    mask = torch.block_diag(*[torch.ones(n, n).tril() for n in LENGTHS]).bool()[None, None]
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for each in (mask, additive):
        found = model(IDS, attention_mask=each, position_ids=POSITIONS, use_cache=False).logits
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


def test_bounds_alone() -> None:
    """Rotary positions then go on, which makes no difference but that of rounded angles."""
    model = build("lolcats:3")
    alone = torch.cat([model(x, use_cache=False).logits for x in IDS.split(LENGTHS, 1)], 1)
    found = model(IDS, cu_seq_lens_q=BOUNDS, use_cache=False).logits
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-3)


def test_which_masks_show_segments() -> None:
    packed = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()[None, None]
    ids = torch.tensor([[0, 0, 2, 2, 2]])
    found = segments_shown(packed.tril(), 5, True, {})
    assert found is not None
    assert torch.equal(found, ids)
    found = segments_shown(packed, 5, False, {})
    assert found is not None
    assert torch.equal(found, ids)
    for mask in (
        packed,  # not causal
        packed.tril().expand(1, 2, 5, 5),  # of heads
        packed.tril()[..., 1:],  # more queries than keys
        packed.tril() & packed.triu(-1),  # a window as well
        packed.tril() & (torch.arange(5) != 3),  # a hidden key
        # every other token: no runs
        (torch.arange(5)[:, None] % 2 == torch.arange(5) % 2).tril()[None, None],
    ):
        assert segments_shown(mask, 5, True, {}) is None


def test_bounds_of_other_tokens_are_named() -> None:
    with pytest.raises(ValueError, match="cu_seq_lens_q ends at 25, but there are 24 tokens"):
        build("norm")(IDS[:, :24], cu_seq_lens_q=BOUNDS, use_cache=False)


def test_a_layer_takes_segments() -> None:
    layer = sr.Attention(32, 4, "mamba2").double()
    x = torch.randn(2, sum(LENGTHS), 32, dtype=torch.float64)
    ids = torch.repeat_interleave(torch.tensor(LENGTHS), torch.tensor(LENGTHS))[None]
    shown = torch.rand(2, 1, 1, sum(LENGTHS)) > 0.3
    found = layer(x, shown, segments=ids)
    parts = zip(x.split(LENGTHS, 1), shown.split(LENGTHS, 3), strict=True)
    torch.testing.assert_close(found, torch.cat([layer(y, mask) for y, mask in parts], 1))
    with pytest.raises(ValueError, match="have no state"):
        layer(x, segments=ids, return_state=True)
    with pytest.raises(ValueError, match=r"segments must be \[B or 1, S\]"):
        layer(x, segments=ids[0])


def test_bounds_that_contradict_a_cache_or_a_mask_are_errors() -> None:
    model = build("taylor:2")
    with pytest.raises(ValueError, match="which have no cache: give use_cache=False"):
        model(IDS, position_ids=POSITIONS, cu_seq_lens_q=BOUNDS, use_cache=True)
    shown = torch.ones_like(IDS)
    shown[0, 0] = 0
    with pytest.raises(ValueError, match="tell of different sequences"):
        model(IDS, attention_mask=shown, cu_seq_lens_q=BOUNDS, use_cache=False)
    one = torch.tensor([0, IDS.shape[1]]).int()  # a single sequence may have both
    expected = model(IDS, attention_mask=shown).logits
    found = model(IDS, attention_mask=shown, cu_seq_lens_q=one, use_cache=True).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
