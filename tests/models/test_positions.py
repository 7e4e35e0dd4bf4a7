"""Positions and padding: only distances between visible tokens matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import softmax_rnn as sr
from converted_families import converted, source
from test_modeling import GREEDY, HYBRID, NAMES, build

# Maps of rotated queries and keys, as in the paper's code and the systems', see absolute positions.
ABSOLUTE = {
    *("linear_elu", "linear_relu", "taylor_elu", "taylor_relu", "relu_gate", "norm_relu"),
    *("rebased", "performer", "rfa", "hedgehog"),
}
# So do a decay per channel and cosFormer's map, of rotated ones: our own layers rotate neither.
ABSOLUTE_IF_ROTATED = ABSOLUTE | {"gla", "cosformer"}
BEFORE = {**HYBRID, "layer_options": {**HYBRID["layer_options"], "map_before_rotary": True}}
NARROW = {"series": "taylor", "order": 2, "window": 3, "outside": "series"}
WINDOWS: dict[str, dict[str, Any]] = {
    **{name: {"attention": name} for name in ("softmax", "taylor:2", "window:3", "gate")},
    **{name: {"attention": name} for name in ("window_state:3", "lolcats:3", "lolcats:3+decay")},
    "window with the first keys": {"attention": {"window": 3, "global_keys": 2}},
    "window_taylor": {"attention": NARROW},
    "hybrid": BEFORE,
}
IDS = torch.randint(1, 61, (5, 16), generator=torch.Generator().manual_seed(2))
SHOWN = torch.tensor(
    [
        [1] * 16,
        [0] * 9 + [1] * 7,
        [1] * 7 + [0] * 9,
        [1] * 5 + [0] * 6 + [1] * 5,
        [0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1],
    ]
)
SPLITS = [(7, 4, 1, 4), (1,) * 16]


def made(kind: str, attention: Any, **options: Any) -> Any:
    """One of our own models or a converted one, in float64."""
    return (
        build(attention, **options) if kind == "own" else converted(kind, attention, **options)
    ).double()


@pytest.mark.parametrize("kind", ["own", "Llama"])
@pytest.mark.parametrize("name", [*NAMES, "hybrid"])
@torch.no_grad()
def test_only_distances_matter(name: str, kind: str) -> None:
    """Up to the rounding of angles in float32, except where a rotated vector is mapped."""
    given = dict(BEFORE) if name == "hybrid" else {"attention": name}
    if kind != "own":
        given["layer_options"] = {
            "rotary": True,
            "qk_dim": None,
            "short_convolution": 0,
            **given.get("layer_options", {}),
        }
    model, positions = made(kind, **given), torch.arange(16)[None]
    logits = [
        model(IDS, position_ids=positions + shift, use_cache=False).logits for shift in (0, 5, 1000)
    ]
    changes = [float((x - logits[0]).abs().max() / logits[0].abs().max()) for x in logits[1:]]
    plain = name.removesuffix("+decay").partition(":")[0]
    if plain in (ABSOLUTE if kind == "own" else ABSOLUTE_IF_ROTATED):
        assert min(changes) > 1e-2
    else:
        assert max(changes) < 1e-4


@pytest.mark.parametrize("family", ["Qwen3", "Gemma", "Phi", "GPTNeoX", "Granite", "GptOss"])
@torch.no_grad()
def test_rotations_of_families(family: str) -> None:
    model, positions = converted(family, "lolcats:3"), torch.arange(16)[None]
    found, moved = (
        model(IDS, position_ids=positions + shift, use_cache=False).logits for shift in (0, 40)
    )
    assert (moved - found).abs().max() <= 1e-4 * found.abs().max()


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *(("own", cache) for cache in ("none", "default", "keys and values")),
        *(("Llama", cache) for cache in ("none", "default")),
    ],
)
@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_padding_counts_in_no_window(name: str, kind: str, cache: str) -> None:
    """On the left, on the right, and between: each row is as if its tokens were alone."""
    model, positions = made(kind, **WINDOWS[name]), (SHOWN.cumsum(1) - 1).clamp(min=0)
    for split in SPLITS if cache != "none" else [(16,)]:
        held, start, parts = DynamicCache() if cache == "keys and values" else None, 0, []
        for count in split:
            now = slice(start, start := start + count)
            out = model(
                IDS[:, now],
                attention_mask=SHOWN[:, :start],
                position_ids=positions[:, now],
                past_key_values=held,
                use_cache=cache != "none",
            )
            held = out.past_key_values
            parts.append(out.logits)
        found = torch.cat(parts, 1)
        for row, shown in enumerate(SHOWN.bool()):
            alone = model(IDS[row : row + 1, shown], use_cache=False).logits[0]
            torch.testing.assert_close(found[row, shown], alone, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["own", "Llama"])
@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_padding_on_the_left_needs_no_positions(name: str, kind: str) -> None:
    model = made(kind, **WINDOWS[name])
    found = model(IDS[:2], attention_mask=SHOWN[:2], use_cache=False).logits
    alone = model(IDS[1:2, 9:], use_cache=False).logits
    torch.testing.assert_close(found[1:, 9:], alone, rtol=1e-4, atol=1e-4)
    given = {"input_ids": IDS[:2], "attention_mask": SHOWN[:2], **GREEDY}
    expected = model.generate(IDS[1:2, 9:], **GREEDY)[0, 7:]
    assert torch.equal(model.generate(**given)[1, 16:], expected)


def test_a_conversion_that_was_saved_before_maps_what_it_did() -> None:
    """A configuration without the fields means a map of rotated queries and keys."""
    rotated = {"map_before_rotary": False}
    model = converted("Llama", "lolcats:3", layer_options=rotated)
    fields = model.config.to_dict()
    for layer in fields["softmax_rnn"]["layers"]:
        assert layer.pop("rotation") == "none"
        assert layer["layer_options"].pop("map_before_rotary") is False
    other = type(model)(type(model.config).from_dict(fields)).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    now = converted("Llama", "lolcats:3")
    assert not torch.allclose(now(IDS).logits, model(IDS).logits, atol=1e-2)
    assert {layer.rotation for layer in now.config.converted_layers} == {"first halves halves"}


def test_positions_that_cannot_be_taken_off_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin: rotate(q.flip(-1) + sin.unsqueeze(1), k, cos, sin),
    )
    with pytest.raises(ValueError, match=r"LlamaAttention applies positions.*map_before_rotary"):
        sr.convert(source("Llama"), "lolcats:3")
    sr.convert(source("Llama"), "lolcats:3", layer_options={"map_before_rotary": False})
