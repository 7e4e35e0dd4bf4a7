"""Packed rows and both directions in the types that users run, held to float64."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from converted_families import IDS, converted
from softmax_rnn.ops import directions
from test_encoders_converted import ENCODERS, source
from test_modeling import TINY, build

LENGTHS = [7, 1, 11, 5]
ROW = IDS.view(1, -1)
# Of the largest logit.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
DECODERS = {
    "own": (None, "taylor:2+decay"),
    "own, with a convolution": (None, "mamba2"),
    "own, of pairs": (None, "norm"),
    "Llama": ("Llama", "taylor:2"),
    "Qwen3": ("Qwen3", "window_state:4"),
    "GPT2": ("GPT2", "taylor:2+decay"),
    "GPTNeoX": ("GPTNeoX", "window:3+decay"),
    "Gemma3": ("Gemma3Text", {1: "norm"}),
}


BOTH = {
    "own": (None, "taylor:2+decay"),
    "bert": ("bert", "taylor:2+decay"),
    "bert classifier": ("bert classifier", "norm+decay"),
    "roberta": ("roberta", "linear_elu+decay"),
    "distilbert": ("distilbert", "window_taylor:2"),
    "ModernBert": ("ModernBert", "window:2+decay"),
}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_packed_rows_are_their_sequences(name: str) -> None:
    family, attention = DECODERS[name]
    given: Any = build(attention) if family is None else converted(family, attention)

    def packed(model: Any, lengths: list[int]) -> Tensor:
        places = torch.cat([torch.arange(n) for n in lengths])[None]
        return model(ROW, position_ids=places, use_cache=False).logits

    for dtype, tolerance in TOLERANCE.items():
        model = copy.deepcopy(given).to(dtype)
        exact = copy.deepcopy(model).double()
        alone = [exact(part, use_cache=False).logits for part in ROW.split(LENGTHS, 1)]
        expected = torch.cat(alone, 1)
        good, bad = (error(packed(model, x), expected) for x in (LENGTHS, [6, 2, 11, 5]))
        assert good <= tolerance
        assert bad > tolerance


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_encoders_look_both_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, attention = BOTH[name]
    if family is None:
        torch.manual_seed(0)
        config = sr.SoftmaxRNNConfig(**TINY, attention=attention, is_causal=False)
        given: Any = sr.SoftmaxRNNForMaskedLM(config).eval()
    elif family in ENCODERS:
        given = sr.convert(source(family), attention)
    else:
        given = converted(family, attention)
    for dtype, tolerance in TOLERANCE.items():
        model = copy.deepcopy(given).to(dtype)
        expected = copy.deepcopy(model).double()(IDS).logits
        assert error(model(IDS).logits, expected) <= tolerance
        original = directions.after

        def swapped(compute: Any, call: Any, distance: int, original: Any = original) -> Any:
            """Later keys in the places of each other."""
            turned = {
                x: None if getattr(call, x) is None else getattr(call, x).flip(2)
                for x in ("k", "v", "log_decay")
            }
            return original(compute, dataclasses.replace(call, **turned), distance)

        with monkeypatch.context() as patch:
            patch.setattr(directions, "after", swapped)
            patch.setattr("softmax_rnn.ops.window.after", swapped)
            assert error(model(IDS).logits, expected) > tolerance


EXPORTED = {
    "own": (None, "taylor:2", torch.bfloat16),
    "Llama": ("Llama", "taylor:2", torch.float32),
    "Gemma": ("Gemma", "linear_elu", torch.float32),
    "GPT2": ("GPT2", "taylor:2+decay", torch.bfloat16),
    "GPTNeoX": ("GPTNeoX", "norm", torch.bfloat16),
}


@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_models_are_exported_for_any_length(name: str) -> None:
    family, attention, dtype = EXPORTED[name]
    model: Any = build(attention) if family is None else converted(family, attention)
    model = model.to(dtype)
    exact = copy.deepcopy(model).double()

    def given(rows: int, tokens: int) -> dict[str, Any]:
        ids = IDS.repeat(1, 4)[:rows, :tokens].clone()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}

    sizes = {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("length", min=2, max=60)}
    shapes = {"input_ids": sizes, "attention_mask": sizes, "use_cache": None}
    program = torch.export.export(model, (), given(2, 24), dynamic_shapes=shapes).module()
    expected = exact(**given(1, 37)).logits
    assert error(program(**given(1, 37)).logits, expected) <= TOLERANCE[dtype]
    if name == "own":  # not of one length alone
        program = torch.export.export(model, (), given(2, 24)).module()
        with pytest.raises((AssertionError, RuntimeError)):
            program(**given(1, 37))
