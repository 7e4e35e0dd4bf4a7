"""convert on encoders like BERT: the source's outputs, padding and packing included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import softmax_rnn as sr

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.1,
}
NARROW = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "initializer_range": 0.1}
ENCODERS: dict[str, Any] = {
    "bert": (BertForMaskedLM, BertConfig(**SIZES)),
    "bert classifier": (BertForSequenceClassification, BertConfig(**SIZES, num_labels=3)),
    "roberta": (RobertaForMaskedLM, RobertaConfig(**SIZES)),
    "distilbert": (
        DistilBertForMaskedLM,
        DistilBertConfig(**NARROW, vocab_size=99, max_position_embeddings=40),
    ),
}
IDS = torch.randint(5, 99, (2, 20), generator=torch.Generator().manual_seed(0))
RIGHT = torch.ones_like(IDS)
RIGHT[1, 13:] = 0
MASKS = (torch.ones_like(IDS), RIGHT, RIGHT.flip(1))


def source(name: str) -> Any:
    kind, config = ENCODERS[name]
    torch.manual_seed(0)
    return kind(copy.deepcopy(config)).double().eval()


def shown(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logits of visible tokens, or of the classes."""
    return logits[mask.bool()] if logits.ndim == 3 else logits


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_softmax_and_a_long_series_are_the_source(name: str, tmp_path: Path) -> None:
    """Scores are small here, so that ten powers are exp; two are not."""
    model = source(name)
    expected = [shown(model(IDS, attention_mask=mask).logits, mask) for mask in MASKS]
    errors = {}
    for attention in ("softmax", "taylor:10", "taylor:2", "norm"):
        ours = sr.convert(copy.deepcopy(model), attention)
        found = [shown(ours(IDS, attention_mask=mask).logits, mask) for mask in MASKS]
        pairs = zip(found, expected, strict=True)
        errors[attention] = max(float((x - y).abs().max()) for x, y in pairs)
        ours.save_pretrained(tmp_path / attention.replace(":", ""))
        auto = AutoModelForMaskedLM
        if name == "bert classifier":
            auto = AutoModelForSequenceClassification
        loaded = auto.from_pretrained(tmp_path / attention.replace(":", ""))
        assert type(loaded) is type(ours)
        again = loaded.double()(IDS, attention_mask=RIGHT).logits
        torch.testing.assert_close(shown(again, RIGHT), found[1], rtol=1e-5, atol=1e-5)
    assert errors["softmax"] <= 1e-10
    assert errors["taylor:10"] <= 1e-6
    assert errors["norm"] > 1e-3
    assert errors["taylor:2"] > 10 * errors["taylor:10"]
    unmasked = sr.convert(model, "softmax")(IDS).logits
    assert (shown(unmasked, RIGHT) - expected[1]).abs().max() > 1e-4


@torch.no_grad()
def test_packed_sequences_of_an_encoder_are_computed_alone() -> None:
    """Batched segments of different lengths do not see what fills up the shorter one."""
    model = sr.convert(source("bert"), "norm")
    ids = torch.arange(20)[None].expand(2, -1) >= 7
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)).unsqueeze(1)
    places = torch.cat((torch.arange(7), torch.arange(13)))[None]
    packed = model(IDS, attention_mask=mask, position_ids=places).logits
    alone = torch.cat([model(x).logits for x in IDS.split((7, 13), 1)], 1)
    torch.testing.assert_close(packed, alone)
    assert (model(IDS, position_ids=places).logits - alone).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["taylor:2+decay", "window_taylor:2", "norm+decay"])
@torch.no_grad()
def test_decays_and_windows_of_an_encoder_look_both_ways(attention: str) -> None:
    """A padded row is its tokens alone, and a full mask is the operation's own."""
    model = sr.convert(source("bert"), attention)
    padded, alone = model(IDS, attention_mask=RIGHT).logits[1, :13], model(IDS[1:, :13]).logits[0]
    torch.testing.assert_close(padded, alone)
    full = RIGHT[:, None, None].bool().expand(-1, 1, 20, -1).clone()
    torch.testing.assert_close(model(IDS, attention_mask=full).logits[1, :13], alone)
    later = IDS.clone()
    later[:, -1] = 5
    moved = (model(later).logits - model(IDS).logits).abs().amax((0, 2))
    assert (moved > 1e-9).all()
