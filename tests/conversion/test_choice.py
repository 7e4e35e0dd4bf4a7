"""Layers that keep softmax by choice: those whose conversion costs most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import softmax_rnn as sr
from converted_families import IDS, converted, source
from softmax_rnn.conversion.choice import costliest, divergences, restore_softmax
from softmax_rnn.conversion.stages import Conversion
from softmax_rnn.training.config import STAGES
from sources import save_source
from test_conversion_stages import _settings, corpus  # noqa: F401  # a fixture


@pytest.mark.parametrize("name", ["window_state:3", "taylor:2"])
def test_divergences_are_those_of_models_with_one_converted_layer(name: str) -> None:
    model = converted("Llama", name)
    found = divergences(model, list(IDS))
    plain = source("Llama")(IDS).logits.log_softmax(-1)
    assert list(found) == [0, 1]
    for index, value in found.items():
        torch.manual_seed(0)
        one = sr.convert(source("Llama"), name, layers=[index])
        state = {key: x for key, x in model.state_dict().items() if key in one.state_dict()}
        one.load_state_dict(state)
        logits = one.eval()(IDS, use_cache=False).logits.log_softmax(-1)
        expected = F.kl_div(logits, plain, reduction="sum", log_target=True) / IDS.numel()
        assert value == pytest.approx(float(expected), rel=1e-3)
        assert value > 0


def test_the_costliest_are_kept() -> None:
    assert costliest({0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}, 2) == [1, 2]
    for count in (0, 4, 5):
        with pytest.raises(ValueError, match=r"must keep softmax in 1 to 3 of the 4 layers"):
            costliest({0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}, count)


def test_a_layer_that_is_softmax_again(tmp_path: Path) -> None:
    model = converted("Llama", "window_state:3")
    expected = sr.convert(source("Llama"), "window_state:3", layers=[1]).eval()
    own = expected.state_dict()
    expected.load_state_dict({key: x for key, x in model.state_dict().items() if key in own})
    restore_softmax(model, [0])
    assert model.state_dict().keys() == own.keys()
    assert model.config.converted_layers == expected.config.converted_layers
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for each in (model, loaded):
        assert torch.equal(each(IDS).logits, expected(IDS).logits)
        ids = each.generate(IDS, max_new_tokens=6, do_sample=False)
        assert torch.equal(ids, expected.generate(IDS, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("attention", ["window_state:8", "taylor:2"])
def test_a_conversion_that_keeps_softmax_by_choice(
    attention: str,
    corpus: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = save_source(tmp_path / "llama")
    settings = {**_settings(steps=2), "keep": 1}
    given = Conversion.of(str(folder), tmp_path / "out", attention, str(corpus), **settings)
    with pytest.raises(ValueError, match="run the stage '(transfer|choose)' first"):
        given.execute(["fit", "finetune"])
    given.execute(STAGES)
    found = json.loads((given.out / "layers.json").read_text())
    costs = {int(index): value for index, value in found["divergence"].items()}
    assert found["converted"] == given.layers == [min(costs, key=costs.__getitem__)]
    model = AutoModelForCausalLM.from_pretrained(given.model)
    specs = [layer.attention["window"] for layer in model.config.converted_layers]
    orders = [layer.spec.order for layer in model.config.converted_layers]
    (kept,) = {0, 1} - set(given.layers)
    assert (specs[kept], orders[kept]) == (None, None)
    before = (given.out / "layers.json").stat().st_mtime_ns
    given.execute(STAGES)
    assert (given.out / "layers.json").stat().st_mtime_ns == before
    assert f"the layers {given.layers[0]}, by" in (given.model / "README.md").read_text()
    other = Conversion.of(str(folder), given.out, attention, str(corpus), **_settings(steps=2))
    with pytest.raises(ValueError, match="in which 1 layers keep softmax by choice, not 0"):
        other.execute(["fit"])
