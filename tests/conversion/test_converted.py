"""convert: the same logits as the source for softmax, and as from_llama for everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)

import softmax_rnn as sr
from converted_families import (
    CAUSAL,
    FAMILIES,
    FAST,
    IDS,
    LEFT,
    cases,
    converted,
    inputs,
    source,
)
from quick import first_quick
from softmax_rnn.conversion.cache import KeyValueLayer, StateLayer
from softmax_rnn.models import from_llama
from softmax_rnn.models.modeling import checkpoint_activations
from test_modeling import GREEDY, NAMES

SPECS = [
    *("norm", "gate", "taylor:2", "taylor:2+decay", "window:3", "linear_elu", "both_gates"),
    "lolcats:3",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", cases(FAMILIES))
@torch.no_grad()
def test_softmax_is_the_source(family: str, dtype: torch.dtype) -> None:
    if any("expert" in field for field in FAMILIES[family][1]) and dtype == torch.float64:
        pytest.skip("experts have no float64")
    model = source(family).to(dtype)
    masks = (torch.ones_like(LEFT), LEFT, LEFT.flip(1))
    expected = []
    for implementation in ("eager", "sdpa"):
        if family == "GptOss" and implementation == "sdpa":
            continue
        if dtype == torch.float64 and implementation == "eager":
            continue  # its weights are in float32
        model.set_attn_implementation(implementation)
        expected.append([model(**inputs(model, mask)).logits for mask in masks])
    sr.convert(model, "softmax")
    found = [model(**inputs(model, mask)).logits for mask in masks]
    assert all(x.isfinite().all() for x in found)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for theirs in expected:
        for mask, x, y in zip(masks, found, theirs, strict=True):
            shown = mask.bool()
            assert (x - y)[shown].abs().max() <= tolerance * y[shown].abs().max()


@pytest.mark.parametrize("family", cases(CAUSAL))
def test_softmax_generates_as_the_source(family: str) -> None:
    model = source(family)
    given = {"input_ids": IDS, "attention_mask": LEFT, **GREEDY}
    expected = model.generate(**given)
    assert torch.equal(sr.convert(model, "softmax").generate(**given), expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_is_that_of_from_llama(name: str) -> None:
    """Bit for bit, gradients included: the weights and the operation are the same."""
    options = {"rotary": True, "qk_dim": None, "short_convolution": 0}
    ours = converted("Llama", name, layer_options=options)
    theirs = from_llama(source("Llama"), name, options)
    renamed = {key.replace(".softmax_rnn", ""): x for key, x in ours.state_dict().items()}
    theirs.load_state_dict(renamed)
    logits = [model(**inputs(model, LEFT)).logits for model in (ours, theirs)]
    # cosFormer's positions differ by a constant in a padded row; LoLCATs' features by a factor.
    rounded = name.startswith(("cosformer", "lolcats"))
    torch.testing.assert_close(*logits, rtol=0, atol=2e-5 if rounded else 0)
    for x in logits:
        x.square().mean().backward()
    gradients = {key: x.grad for key, x in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        expected = gradients[key.replace(".softmax_rnn", "")]
        tolerance = 1e-5 if rounded else 0
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=tolerance)
    with torch.no_grad():
        alone = ours(IDS[1:, 4:]).logits
        torch.testing.assert_close(logits[0][1, 4:], alone[0], rtol=1e-4, atol=1e-4)
        cache = ours.new_cache()
        parts = [ours(x, past_key_values=cache).logits for x in IDS.split([5, 1, 6], dim=1)]
        whole = ours(IDS, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


# Each of the fast families with every attention. The others with those that change most of a layer
# (a state with parameters of its own, features before the positions) and two of the rest in turn.
MOST = ["taylor:2+decay", "lolcats:3"]
REST = [name for name in SPECS if name not in MOST]
PAIRS = [
    pytest.param(
        family, name, marks=() if family in FAST and name == SPECS[0] else pytest.mark.slow
    )
    for number, family in enumerate(family for family in FAMILIES if family != "GptOss")
    for name in (SPECS if family in FAST else [*MOST, *REST[number % 3 :: 3]])
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_every_family_with_other_attentions(family: str, name: str, tmp_path: Path) -> None:
    bidirectional = family not in CAUSAL
    if family == "RecurrentGemma" and sr.layer_options(name).map_before_rotary:
        with pytest.raises(ValueError, match="applies positions .* cannot be taken off"):
            converted(family, name)
        return
    model = converted(family, name)
    plain = source(family)
    with torch.no_grad():
        found = model(**inputs(model, LEFT)).logits
        assert found.isfinite().all()
        assert not torch.allclose(found, plain(**inputs(plain, LEFT)).logits, atol=1e-3)
        alone = {key: x[1:, 4:] for key, x in inputs(model, LEFT).items()}
        # Bidirectional positions count from the left; RecurrentGemma's convolution sees padding.
        if not bidirectional and family != "RecurrentGemma":
            torch.testing.assert_close(found[1, 4:], model(**alone).logits[0], rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path)
    auto = AutoModelForMaskedLM if bidirectional else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert type(loaded) is type(model)
    assert loaded.config.softmax_rnn == model.config.softmax_rnn
    with torch.no_grad():
        assert torch.equal(loaded(**inputs(loaded, LEFT)).logits, found)
    for module in model.modules():  # for a gradient
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()(**inputs(model, LEFT)).logits.square().mean().backward()
    gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    assert all(x.isfinite().all() for x in gradients.values())
    own = [key for key, _ in model.named_parameters() if "softmax_rnn" in key]
    assert all(gradients[key].abs().max() > 0 for key in own)
    if bidirectional:
        return
    model.eval()
    given = {"input_ids": IDS, "attention_mask": LEFT, **GREEDY}
    for options in ({}, {"num_beams": 3}):
        expected = model.generate(**given, **options, use_cache=False)
        assert torch.equal(model.generate(**given, **options), expected)


def test_padding_on_the_right_hides_nothing_from_a_bidirectional_row() -> None:
    model = converted("Bert", "norm")
    with torch.no_grad():
        found = model(IDS, attention_mask=LEFT.flip(1)).logits[1, :8]
        torch.testing.assert_close(found, model(IDS[1:, :8]).logits[0], rtol=1e-4, atol=1e-4)
        ahead = model(torch.cat((IDS[:, :8], IDS[:, 8:].flip(1)), 1)).logits
    assert not torch.allclose(ahead[:, 0], model(IDS).logits[:, 0])


def test_some_layers_only() -> None:
    ours = converted("Llama", "taylor:2+decay", layers=[1])
    assert [layer.spec.series for layer in ours.config.converted_layers] == ["exp", "taylor"]
    mapping = converted("Llama", {1: sr.variant("taylor:2+decay").to_dict()})
    assert mapping.config.softmax_rnn == ours.config.softmax_rnn
    assert torch.equal(mapping(IDS).logits, ours(IDS).logits)
    plain = source("Llama")
    assert torch.equal(
        ours.model.layers[0](ours.model.embed_tokens(IDS), **rotary(ours)),
        plain.model.layers[0](plain.model.embed_tokens(IDS), **rotary(plain)),
    )
    given = {"input_ids": IDS, "attention_mask": LEFT, **GREEDY}
    found = ours.generate(**given, return_dict_in_generate=True)
    layers = found.past_key_values.layers
    assert isinstance(layers[1], StateLayer)
    assert isinstance(layers[0], KeyValueLayer)
    assert torch.equal(found.sequences, ours.generate(**given, use_cache=False))


def rotary(model: Any) -> dict[str, Any]:
    """The positions that a decoder layer takes."""
    x = model.model.embed_tokens(IDS)
    return {"position_embeddings": model.model.rotary_emb(x, torch.arange(12)[None])}


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("name", ["taylor:2+decay", "both_gates", "mamba2"])
def test_gradient_checkpointing_changes_no_gradient(name: str, reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = converted("Llama", name, layer_options={"rotary": True}).train()
        if checkpointing:
            checkpoint_activations(model, {"use_reentrant": reentrant})
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("family", "name"),
    first_quick([("Llama", "taylor:2+decay"), ("GPT2", "gate"), ("Bert", "norm")]),
)
def test_compiled_logits_are_the_same(family: str, name: str) -> None:
    model = converted(family, name)
    given = {key: x for key, x in inputs(model, LEFT).items() if key != "position_ids"}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**given).logits, model(**given).logits)


def test_packed_sequences_do_not_see_each_other() -> None:
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    for name in ("softmax", "taylor:2+decay", "window:3", "window_state:3", "lolcats:2", "norm"):
        model, ids = converted("Llama", name), IDS[:1]
        found = model(ids, position_ids=positions, use_cache=False).logits
        parts = [model(part, use_cache=False).logits for part in ids.split([7, 5], dim=1)]
        torch.testing.assert_close(found, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-4)


def test_bounds_of_packed_sequences_keep_the_familys_window() -> None:
    positions = torch.cat((torch.arange(3), torch.arange(9)))[None]
    bounds = torch.tensor([0, 3, 12]).int()
    for family in ("Mistral", "Gemma3Text"):
        model, ids = converted(family, "taylor:2"), IDS[:1]
        alone = [model(part, use_cache=False).logits for part in ids.split([3, 9], dim=1)]
        given = {"position_ids": positions, "cu_seq_lens_q": bounds, "use_cache": False}
        found = model(ids, **given).logits
        torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


def test_masks_of_callers() -> None:
    model, shown = converted("Llama", "norm"), torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    torch.testing.assert_close(model(IDS, attention_mask=shown).logits, model(IDS).logits)
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~shown, -1e9)
    with pytest.raises(ValueError, match="an additive one could hold a bias"):
        model(IDS, attention_mask=additive)
