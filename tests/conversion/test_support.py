"""The table of the page about serving: what each kind of attention supports."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

import softmax_rnn as sr
from converted_families import IDS, converted
from test_modeling import GREEDY, build

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "serve.md"
FIVE = IDS[:1, :5]


def made(kind: str, attention: str) -> Any:
    """The model of a row: our own, or a conversion of Qwen3, all its layers or one of two."""
    if kind.startswith("a conversion"):
        model = converted("Qwen3", {1: attention} if "softmax layers" in kind else attention)
    else:
        model = build(attention)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "short_convolution" in name:
                    parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.double()


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits without anything else."""
    return model(ids, use_cache=False).logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def padding(model: Any) -> None:
    """On the left and on the right, of rows of one batch."""
    ids = IDS[:, :9]
    for hidden, visible in ((slice(4), slice(4, 9)), (slice(5, 9), slice(5))):
        shown = torch.ones_like(ids)
        shown[1, hidden] = 0
        place = shown.cumsum(1).sub(1).clamp(min=0)
        given = {"attention_mask": shown, "position_ids": place, "use_cache": False}
        found = model(ids, **given).logits
        close(found[1, visible], alone(model, ids[1:, visible])[0])


def packing(model: Any) -> None:
    """Two sequences in a row."""
    parts = IDS[:1, :7], IDS[1:, :5]
    place = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    found = model(torch.cat(parts, 1), position_ids=place, use_cache=False).logits
    close(found, torch.cat([alone(model, part) for part in parts], 1))


def undo(model: Any) -> None:
    """Assisted decoding, whose last proposals are refused."""
    settings = {**GREEDY, "eos_token_id": 60}
    expected = model.generate(IDS[:1], **settings)
    assert torch.equal(model.generate(IDS[:1], **settings, prompt_lookup_num_tokens=4), expected)
    cache = model(FIVE, use_cache=True, past_key_values=model.new_cache()).past_key_values
    cache.activate_past_recording()
    model(IDS[:1, 5:9], past_key_values=cache)
    cache.crop(-3)
    found = model(IDS[1:, 6:9], past_key_values=cache).logits
    ids = torch.cat((IDS[:1, :6], IDS[1:, 6:9]), 1)
    close(found, alone(model, ids)[:, 6:])


def prefixes(model: Any) -> None:
    """A prefix that two requests of a batch continue; saved where it has states."""
    prefix = model(FIVE, use_cache=True, past_key_values=model.new_cache()).past_key_values
    own = isinstance(prefix, sr.RecurrentCache)
    cache = prefix.snapshot() if own else copy.deepcopy(prefix)
    cache.batch_repeat_interleave(2)
    found = model(IDS[:, 5:9], past_key_values=cache).logits
    ids = torch.cat((FIVE.expand(2, -1), IDS[:, 5:9]), 1)
    close(found, alone(model, ids)[:, 5:])


def beams(model: Any) -> None:
    """Beam search chooses as without a cache."""
    found = [model.generate(IDS, **GREEDY, num_beams=3, **x) for x in ({}, {"use_cache": False})]
    assert torch.equal(*found)


def static(model: Any) -> None:
    """A cache of fixed addresses: of states, or of keys and values."""
    own = type(model.new_cache()) is sr.RecurrentCache and type(model).__name__.startswith("Soft")
    options: dict[str, Any] = {"past_key_values": sr.RecurrentCache(static=True)}
    if not own:
        options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(
        model.generate(IDS, **GREEDY, **options), model.generate(IDS, **GREEDY, use_cache=False)
    )


CHECKS: dict[str, Callable[[Any], None]] = {
    "padding": padding,
    "packing": packing,
    "undo": undo,
    "shared prefix": prefixes,
    "beams": beams,
    "static cache": static,
}


def table() -> list[tuple[str, dict[str, str]]]:
    """The rows of the page: a kind and its name, and the cells by column."""
    lines = re.findall(r"^\| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    head = next(row for row in rows if row[0] == "kind")
    return [
        (f"{row[0]}: {row[1].strip('`')}", dict(zip(head[2:], row[2:], strict=True)))
        for row in rows[rows.index(head) + 1 :]
        if not row[0].startswith("-")
    ]


@pytest.mark.parametrize(("row", "cells"), table(), ids=lambda x: x if isinstance(x, str) else "")
@torch.no_grad()
def test_the_table_says_what_holds(row: str, cells: dict[str, str]) -> None:
    """A cell that says no is an error, and not another result."""
    model = made(*row.split(": ", 1))
    for name, check in CHECKS.items():
        if name == "undo" and not hasattr(Cache, "activate_past_recording"):
            continue  # of an older version of transformers, as the page says
        if cells[name].startswith("yes"):
            check(model)
        else:
            assert cells[name] == "no"
            with pytest.raises(ValueError, match="use model.new_cache|use a DynamicCache"):
                check(model)


def test_the_checks_of_the_table_find_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that are ignored, positions that go on, tokens that stay."""
    assert len(table()) == 11
    model = made("a finite series", "taylor:2")
    forward = type(model).forward

    def forgetful(self: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        given.pop("attention_mask", None)
        given.pop("position_ids", None)
        return forward(self, input_ids, **given)

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "forward", forgetful)
            for check in (padding, packing):
                with pytest.raises(AssertionError, match="not close"):
                    check(model)
        monkeypatch.setattr(sr.RecurrentCache, "crop", lambda *_: None)
        with pytest.raises(AssertionError):
            undo(model)
        monkeypatch.setattr(sr.RecurrentCache, "batch_repeat_interleave", lambda *_: None)
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            prefixes(model)
