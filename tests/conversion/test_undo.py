"""Tokens taken back and prefixes shared: one interface of our own models and of converted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

import softmax_rnn as sr
from converted_families import IDS, LEFT, converted
from softmax_rnn.models import generation
from softmax_rnn.models.cache_layers import LAYERS
from test_modeling import GREEDY, HYBRID, build

# Our own models; families whose layers have states, all keys, or a window of keys.
OWN = ("taylor:2", "taylor:2+decay", "mamba2", "hybrid")
CONVERTED: dict[str, tuple[str, Any]] = {
    "Llama": ("Llama", "taylor:2"),
    "Qwen3 hybrid": ("Qwen3", {1: "window_state:4"}),
    "Gemma": ("Gemma", "window_state:4"),
    "GPT2": ("GPT2", "taylor:2+decay"),
    "GPTNeoX": ("GPTNeoX", "window:3+decay"),
    "Gemma3 hybrid": ("Gemma3Text", {1: "taylor:2"}),
    "Mistral": ("Mistral", "both_gates"),
}
# Padding on the left, and in between: of tokens that stay, and of some that are taken back.
SHOWN = torch.cat((LEFT, torch.ones_like(LEFT)), 1)
SHOWN[0, 9:12] = SHOWN[1, 13:15] = 0
TOKENS, OTHERS = torch.cat((IDS, IDS.flip(1)), 1), torch.cat((IDS, IDS.roll(5, 1)), 1)


def made(name: str) -> Any:
    """A model whose own parameters are not at their initial values."""
    if name in CONVERTED:
        return converted(*CONVERTED[name])
    model = build(**HYBRID) if name == "hybrid" else build(name)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "short_convolution" in key:
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


def read(model: Any, cache: Any, start: int, stop: int, ids: torch.Tensor = TOKENS) -> torch.Tensor:
    """The logits of some tokens after those of the cache."""
    shown = SHOWN[:, :stop]
    place = shown.cumsum(1).sub(1).clamp(min=0)[:, start:stop]
    given = {"attention_mask": shown, "position_ids": place, "past_key_values": cache}
    return model(ids[:, start:stop], use_cache=True, **given).logits


def tensors(cache: Any) -> list[torch.Tensor]:
    """What a cache holds."""
    return [x for layer in cache.layers for _, x in sorted(layer.saved()[0].items())]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether all bits are the same."""
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*OWN, *CONVERTED])
@torch.no_grad()
def test_tokens_taken_back_leave_no_trace(name: str) -> None:
    """In the middle of a call up to rounding; between two calls bit for bit."""
    model = made(name)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        exact, model = dtype != torch.float64, model.to(dtype)
        stop = 13 if exact else 12  # calls end at 13, 14, 15 and 18
        cache = model.new_cache()
        read(model, cache, 0, 10)
        never = cache.snapshot()
        cache.activate_past_recording()
        for start, end in ((10, 13), (13, 14), (14, 15), (15, 18)):
            read(model, cache, start, end)
        early, empty = cache.snapshot(), cache.snapshot()
        cache.crop(stop - 18)
        assert cache.get_seq_length() == stop
        read(model, never, 10, stop)
        assert same(tensors(cache), tensors(never)) or not exact
        expected = read(model, never, stop, 17, OTHERS)
        found = read(model, cache, stop, 17, OTHERS)
        if exact:
            assert torch.equal(found, expected)
            assert same(tensors(cache), tensors(never))
        else:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        cache.crop(-4)  # also what came after
        cache.crop(0)
        with pytest.raises(ValueError, match="takes back 1 tokens, but only 0 can"):
            cache.crop(-1)
        early.crop(stop + 1 - 18)  # a token too few
        wrong = read(model, early, stop + 1, 18, OTHERS)[:, : 17 - stop]
        assert not torch.allclose(wrong, expected, rtol=1e-2, atol=1e-2)
        empty.crop(-8)
        assert empty.get_seq_length() == 10


@pytest.mark.parametrize("name", [*OWN, *CONVERTED])
@torch.no_grad()
def test_prefixes_are_shared(name: str, tmp_path: Path) -> None:
    """What comes after a snapshot, token by token as well, changes none of its bits."""
    model = made(name)
    for dtype in (torch.float32, torch.bfloat16):
        model, cache = model.to(dtype), model.new_cache()
        read(model, cache, 0, 14)
        prefix = cache.snapshot()
        before = [x.clone() for x in tensors(prefix)]
        assert [x.data_ptr() for x in tensors(cache)] == [x.data_ptr() for x in tensors(prefix)]

        def answers(cache: Any, ids: torch.Tensor, model: Any = model) -> torch.Tensor:
            return torch.cat([read(model, cache, i, i + 1, ids) for i in range(14, 19)], 1)

        expected = answers(cache, OTHERS)
        assert not torch.equal(expected, answers(cache.snapshot(), OTHERS))  # more came before
        cache.restore(prefix)
        assert (cache.get_seq_length(), cache.nbytes) == (14, prefix.nbytes)
        assert torch.equal(answers(cache, OTHERS), expected)
        cache.reset()
        assert same(tensors(prefix), before)
        prefix.save(tmp_path / "prefix.safetensors")
        loaded = sr.RecurrentCache.load(tmp_path / "prefix.safetensors")
        assert same(tensors(loaded), before)
        assert [type(x) for x in loaded.layers] == [type(x) for x in prefix.layers]
        assert torch.equal(answers(loaded, OTHERS), expected)
        cache.restore(loaded)
        assert cache.get_seq_length() == 19


@pytest.mark.parametrize("name", ["mamba2", "Qwen3 hybrid", "Gemma3 hybrid"])
@torch.no_grad()
def test_many_requests_continue_one_prefix(name: str) -> None:
    model, cache = made(name).double(), None
    document, questions = IDS[:1], torch.cat((IDS, IDS.flip(1)))[:3]
    cache = model(document, use_cache=True).past_key_values
    prefix = cache.snapshot()
    cache.batch_repeat_interleave(3)
    together = model(questions, past_key_values=cache, use_cache=True).logits
    for row, question in zip(together, questions.split(1), strict=True):
        cache.restore(prefix)
        alone = model(question, past_key_values=cache, use_cache=True).logits[0]
        torch.testing.assert_close(row, alone, rtol=1e-9, atol=1e-9)
    cache.restore(prefix)
    ids = torch.cat((document, questions[:1]), 1)
    found = model.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(found, model.generate(ids, **GREEDY))
    cache.restore(model.new_cache())
    assert cache.get_seq_length() == 0
    assert not torch.equal(together[0], together[1])


ASSISTED = [
    *((name, "draft") for name in ("taylor:2+decay", "mamba2", "hybrid", "Qwen3 hybrid")),
    *((name, "lookup") for name in ("taylor:2", "mamba2", "Llama", "Gemma", "GPT2", "GPTNeoX")),
    *(("Gemma3 hybrid", "lookup"), ("Mistral", "draft"), ("Llama", "early exit")),
]


# Older versions take keys and values: test_cache.py.
with_protocol = pytest.mark.skipif(
    not hasattr(Cache, "activate_past_recording"), reason="transformers 5.6 cannot ask for it"
)


@with_protocol
@pytest.mark.parametrize(("name", "how"), ASSISTED)
def test_assisted_decoding_with_states_is_greedy(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = made(name).double(), IDS[:1]
    settings = {**GREEDY, "eos_token_id": 60, "max_new_tokens": 24}
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if how == "early exit":
        options = {"assistant_early_exit": 1}
    elif how == "draft":
        options = {"assistant_model": build("taylor:2", num_hidden_layers=1).double()}
        options["assistant_model"].generation_config.num_assistant_tokens = 4
        options["assistant_model"].generation_config.assistant_confidence_threshold = 0.0
    expected = model.generate(ids, **settings)
    removed: list[int] = []
    crop = sr.RecurrentCache.crop

    def noted(cache: sr.RecurrentCache, tokens_to_remove: int) -> None:
        removed.append(tokens_to_remove)
        crop(cache, tokens_to_remove)

    monkeypatch.setattr(sr.RecurrentCache, "crop", noted)
    found = model.generate(ids, **settings, **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert min(removed) <= (-1 if how == "early exit" else -2)
    cache = found.past_key_values
    assert type(cache) is sr.RecurrentCache
    assert not cache.record_past
    model(found.sequences[:, -1:], past_key_values=cache)  # a later token is not recorded
    assert not any(layer.record_past for layer in cache.layers)


@with_protocol
@pytest.mark.parametrize("name", ["taylor:2", "Qwen3 hybrid"])
def test_a_fault_of_undo_changes_the_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(name).double(), IDS[:1]
    settings = {**GREEDY, "eos_token_id": 60, "max_new_tokens": 24, "prompt_lookup_num_tokens": 4}
    expected = model.generate(ids, **settings)
    for layer in LAYERS.values():
        crop = layer.crop
        monkeypatch.setattr(layer, "crop", lambda x, count, crop=crop: crop(x, min(count + 1, 0)))
    assert not torch.equal(model.generate(ids, **settings), expected)


def test_older_transformers_crop_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which settings choose transformers' cache is decided when the module is read."""
    settings = ("is_assistant", "assistant_model", "assistant_early_exit")
    assert generation.chosen_by(undo=False)[2:] == (*settings, "prompt_lookup_num_tokens")
    monkeypatch.setattr(generation, "_CHOOSE_A_CACHE", generation.chosen_by(undo=False))
    model = made("taylor:2")
    ids = IDS[:1]
    given = {**GREEDY, "eos_token_id": 60, "prompt_lookup_num_tokens": 4}
    found = model.generate(ids, **given, return_dict_in_generate=True)
    assert type(found.past_key_values) is not sr.RecurrentCache
    assert torch.equal(found.sequences, model.generate(ids, **{**GREEDY, "eos_token_id": 60}))


@torch.no_grad()
def test_a_static_cache_takes_tokens_back_at_its_addresses() -> None:
    model, static = made("mamba2"), sr.RecurrentCache(static=True)
    read(model, static, 0, 10)
    prefix = static.snapshot()
    addresses = [x.data_ptr() for x in tensors(static)]
    static.activate_past_recording()
    expected = read(model, static, 10, 12)
    read(model, static, 12, 15)
    static.crop(-5)
    assert int(static.get_seq_length()) == 10
    assert torch.equal(read(model, static, 10, 12), expected)
    assert not torch.equal(read(model, static, 12, 14), expected)
    static.restore(prefix)
    assert torch.equal(read(model, static, 10, 12), expected)
    assert [x.data_ptr() for x in tensors(static)] == addresses
    assert int(prefix.get_seq_length()) == 10
    static.restore(sr.RecurrentCache())
    assert static.get_seq_length() == 0


@with_protocol
@pytest.mark.parametrize("attention", ["taylor:2", "window:3", "both_gates"])
@torch.no_grad()
def test_convolutions_of_a_family_take_tokens_back(attention: str) -> None:
    """They do not say what they have recorded, which keys of all tokens do not limit."""
    model, ids = converted("Lfm2", attention).double(), TOKENS

    def after(tokens: int, recorded: tuple[int, ...] = ()) -> Any:
        cache = model.new_cache()
        model(ids[:, :tokens], past_key_values=cache, use_cache=True)
        if recorded:
            cache.activate_past_recording()
        for stop in recorded:
            model(ids[:, tokens:stop], past_key_values=cache)
            tokens = stop
        return cache

    def same_tokens(cache: Any, tokens: int) -> bool:
        expected = model(ids[:, : tokens + 3]).logits[:, tokens:]
        found = model(ids[:, tokens : tokens + 3], past_key_values=cache).logits
        return torch.allclose(found, expected, rtol=1e-10, atol=1e-10)

    cache = after(10, (13, 14))
    assert type(cache.layers[0]).__name__ == "LinearAttentionLayer"
    for count in (-5, -14):
        with pytest.raises(ValueError, match="but only 4 can be taken back"):
            cache.crop(count)
    twin = cache.snapshot()
    cache.crop(-2)
    assert same_tokens(cache, 12)
    twin.crop(-4)
    assert same_tokens(twin, 10)
    assert not same_tokens(after(10, (13,)), 10)
    cache = after(10, (13,))
    cache.crop(-1)
    with pytest.raises(ValueError, match="but only 0 can be taken back"):
        cache.crop(-1)
    cache = after(10, (13,))
    cache.end_past_recording()
    with pytest.raises(ValueError, match="but only 0 can be taken back"):
        cache.crop(-1)
    assert same_tokens(cache, 13)
    cache = after(10, (13,))
    cache.reset()
    cache.end_past_recording()
    cache.crop(0)
    assert same_tokens(cache, 0)
    cache = model.new_cache()
    cache.activate_past_recording()
    cache.crop(0)
    model(ids[:, :4], past_key_values=cache, use_cache=True)
    cache.crop(-3)
    assert same_tokens(cache, 1)


@torch.no_grad()
def test_a_restored_cache_records_as_its_snapshot_did() -> None:
    model = made("taylor:2")
    cache = model(IDS, use_cache=True).past_key_values
    before = cache.snapshot()
    cache.activate_past_recording()
    during = cache.snapshot()
    for snapshot, recorded in ((before, 0), (during, 3)):
        cache.restore(snapshot)
        assert {cache.record_past, *(x.record_past for x in cache.layers)} == {recorded > 0}
        model(IDS[:, :3], past_key_values=cache)
        assert [x.removable for x in cache.layers] == [recorded] * len(cache.layers)


@torch.no_grad()
def test_mistakes_of_undo_are_named() -> None:
    model, hybrid = made("taylor:2"), made("Qwen3 hybrid")
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"crop takes .* as an integer <= 0, such as -3, not 1"):
        cache.crop(1)
    with pytest.raises(ValueError, match="not True"):
        cache.crop(True)
    with pytest.raises(ValueError, match="only 0 can be taken back: those since activate_past"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="takes back 1 tokens, but only 0"):
        sr.RecurrentCache().crop(-1)
    cache.activate_past_recording()
    model(IDS[:, :3], past_key_values=cache)
    with pytest.raises(ValueError, match=r"crop\(-4\) takes back 4 tokens, but only 3 can"):
        cache.crop(-4)
    assert cache.get_seq_length() == 15
    cache.batch_repeat_interleave(2)  # what was recorded is of other rows
    with pytest.raises(ValueError, match="or a change of the batch"):
        cache.crop(-1)
    mixed = hybrid(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"KeyValueLayer.*not a RecurrentCache with \['Recurrent"):
        mixed.restore(cache)
    with pytest.raises(ValueError, match=r"not a list with \[\]"):
        cache.restore([])  # type: ignore[arg-type]
    before = [x.clone() for x in tensors(mixed)]
    with pytest.raises(ValueError, match="only 0"):  # the layer of keys could
        mixed.crop(-2)
    assert same(tensors(mixed), before)
    linear = converted("Qwen3Next", "taylor:2")
    cache = linear(IDS, use_cache=True).past_key_values
    twin = cache.snapshot()
    expected = linear(IDS, past_key_values=cache).logits
    assert torch.equal(linear(IDS, past_key_values=twin).logits, expected)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="LinearAttentionLayer cannot take tokens back"):
        cache.crop(-1)
