"""``analyze`` on decoders of other families, against the weights that they compute themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from converted_families import REFUSED, converted, refused, source
from softmax_rnn.analysis.heads import terms
from softmax_rnn.analysis.heads.analyze import analyze
from softmax_rnn.analysis.heads.weights import RECENT_KEYS
from softmax_rnn.models import from_llama

FAMILIES = (
    *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Gemma3Text", "Phi", "GPT2"),
    *("GPTNeoX", "Olmo2", "Granite", "GptOss"),
)
IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, 20:] = 0
SHARES = ["sink_share", "recent_share", "score_range", "effective_keys"]
FEW = {"order": 2, "max_order": 6}


def by_rows(weights: Tensor, shown: Tensor) -> dict[str, float]:
    """The columns of one head, from its weights [N, T, T], row by row."""
    first, recent, spread, entropy = [], [], [], []
    for matrix, tokens in zip(weights.double().numpy(), shown.bool().numpy(), strict=True):
        for t in np.flatnonzero(tokens):
            seen = [s for s in np.flatnonzero(tokens) if s <= t and matrix[t, s] > 0]
            row = matrix[t, seen]
            if seen[0] == np.flatnonzero(tokens)[0] and len(seen) > 1:
                first.append(row[0])
            recent.append(row[-RECENT_KEYS:].sum())
            spread.append(np.log(row.max() / row.min()))
            row = row / row.sum()
            entropy.append(-(row * np.log(row)).sum())
    means = [np.mean(x) for x in (first, recent, spread, entropy)]
    return dict(zip(SHARES, [*means[:3], np.exp(means[3])], strict=True))


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_are_those_of_the_familys_own_weights(
    family: str, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "_ROWS", 5)
    model = source(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        given = {"input_ids": IDS, "attention_mask": mask, "output_attentions": True}
        weights = model(**given).attentions
    found = analyze(model, IDS, mask=mask, **FEW).heads
    assert len(found) == 8
    shown = torch.ones_like(IDS) if mask is None else mask
    for head in found.to_dict("records"):
        expected = by_rows(weights[head["layer"]][:, head["head"]], shown)
        for name in SHARES:
            # Their weights and our scores are float32; scores are at most a few tens.
            tolerance = 1e-6 * max(1.0, head["max_score"]) * max(1.0, expected[name])
            assert abs(head[name] - expected[name]) <= tolerance, name
    assert found.sink_share.max() < 0.9  # else little was put to the test


@pytest.mark.parametrize("family", ["Mistral", "GptOss"])
def test_the_model_is_left_as_it_was(family: str) -> None:
    model = source(family).train()
    chosen, modules = model.config._attn_implementation, list(model.modules())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    kind, fields = type(model), model.config.to_dict()
    analyze(model, IDS, **FEW)
    assert model.config._attn_implementation == chosen
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(module.training for module in modules)
    assert not any(module._forward_pre_hooks for module in modules)
    assert (type(model), model.config.to_dict()) == (kind, fields)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def same(a: Any, b: Any, **tolerances: float) -> None:
    one, other = (analyze(model, IDS, mask=PADDED, order=3, max_order=40) for model in (a, b))
    pd.testing.assert_frame_equal(one.heads, other.heads, **tolerances)
    pd.testing.assert_frame_equal(one.powers, other.powers, **tolerances)


def test_a_llama_is_as_our_own_model_with_its_weights() -> None:
    same(source("Llama"), from_llama(source("Llama")), rtol=1e-4)
    double = source("Llama").double()
    same(double, from_llama(double), rtol=1e-9)
    same(double, sr.convert(source("Llama").double(), "softmax"), rtol=1e-9)


@pytest.mark.parametrize(
    "name",
    ["taylor:2+decay", "window:5+decay", "both_gates", "window_taylor:2", "attention_sink", "gla"],
)
def test_a_converted_llama_is_as_our_own_model_with_its_weights(name: str) -> None:
    options = {"rotary": True, "qk_dim": None}
    ours = converted("Llama", name, layer_options=options)
    theirs = from_llama(source("Llama"), name, options)
    renamed = {key.replace(".softmax_rnn", ""): x for key, x in ours.state_dict().items()}
    theirs.load_state_dict(renamed)
    same(ours.double(), theirs.double(), rtol=1e-9)


def test_layers_have_their_own_specs() -> None:
    model = sr.convert(source("GPT2", n_layer=4), {1: "taylor:2", 3: "window:3"})
    found = analyze(model, IDS, **FEW)
    assert [spec.series for spec in found.specs.values()] == ["exp", "taylor", "exp", "exp"]
    assert [spec.window for spec in found.specs.values()] == [None, None, None, 3]
    scales = [spec.scale for spec in found.specs.values()]
    np.testing.assert_allclose(scales, [8**-0.5 / (n + 1) for n in range(4)])  # by layer
    assert "of 1 of 4 layers are not exp (series='taylor', order=2)" in found.note
    # A row sees three keys, and without the first token nothing is its share.
    assert (found.heads.query("layer == 3").effective_keys <= 3).all()
    alone = analyze(model, IDS[:, :1], **FEW)
    assert alone.heads.sink_share.isna().all()
    assert (alone.heads.effective_keys == 1).all()


def test_one_is_added_to_the_row_sum() -> None:
    """With all scores 0, the t keys of a row have the weight 1 / (t + 1) each."""
    model = sr.convert(source("Llama"), "softmax_plus_one")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = analyze(model, IDS, **FEW).heads
    t = np.arange(1, 25)
    np.testing.assert_allclose(found.sink_share, np.mean(1 / (t[1:] + 1)))
    np.testing.assert_allclose(found.recent_share, np.mean(np.minimum(t, RECENT_KEYS) / (t + 1)))
    np.testing.assert_allclose(found.effective_keys, np.exp(np.log(t).mean()))
    assert (found.score_range == 0).all()


@pytest.mark.parametrize(
    "message", [x for x in REFUSED if REFUSED[x][0] in ("Gemma2", "Bloom", "GPT2")]
)
def test_what_is_not_computed_is_named(message: str) -> None:
    model = refused(message)
    before = type(model), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        analyze(model, IDS)
    assert (type(model), model.config.to_dict()) == before


@pytest.mark.parametrize("model", ["source", "converted"])
def test_an_encoder_is_named(model: str) -> None:
    made = source("Bert") if model == "source" else converted("Bert", "norm")
    with pytest.raises(ValueError, match=r"layer\.0\..* sees later tokens; only decoders"):
        analyze(made, IDS)
