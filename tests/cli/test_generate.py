"""``generate``: text from a saved model, with the cache that was asked for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from softmax_rnn._utils.integrity import seal
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.cli.generate import generate
from softmax_rnn.data import task_tokenizer
from softmax_rnn.data.tokenizer import byte_tokenizer, load_tokenizer
from softmax_rnn.models import convert
from softmax_rnn.models.loading import load_model
from softmax_rnn.training import checkpoint
from softmax_rnn.training.checkpoint import CheckpointError, model_folder
from sources import save_source
from test_modeling import build


def saved(folder: Path, name: str) -> Path:
    """A tiny byte model with weights that make it say something."""
    build(name, vocab_size=257, eos_token_id=None, bos_token_id=None).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "default"), [("taylor:2", "recurrent"), ("norm", "key-value")])
def test_every_cache_gives_the_same_text(
    name: str, default: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path, name)
    auto = generate(model, "def ", max_new_tokens=12, streamed=True)
    assert auto.cache == default
    assert auto.text
    assert capsys.readouterr().out.rstrip("\n") == "def " + auto.text.rstrip("\n")
    for cache in ("none", "key-value", "recurrent"):
        if name == "norm" and cache == "recurrent":
            continue
        assert generate(model, "def ", max_new_tokens=12, cache=cache).text == auto.text, cache
    sizes = str(auto)
    assert f"cache: {default}" in sizes
    assert ("smaller from" if default == "recurrent" else "has no recurrent form") in sizes


def test_sampling_is_a_function_of_the_seed(tmp_path: Path) -> None:
    model = saved(tmp_path, "taylor:2")
    texts = [
        generate(model, "a", max_new_tokens=9, temperature=1.5, top_k=50, seed=seed).text
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_newest_checkpoint_of_a_folder_is_taken(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint-9", "norm")
    saved(tmp_path / "checkpoint-10", "taylor:2")
    assert generate(tmp_path, "a", max_new_tokens=2).cache == "recurrent"


def test_a_damaged_checkpoint_of_a_run_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()  # a run's folder
    older, newer = tmp_path / "checkpoint-9", tmp_path / "checkpoint-10"
    for path, name in ((older, "norm"), (newer, "taylor:2")):
        seal(saved(path, name))
    assert generate(newer, "a", max_new_tokens=2).cache == "recurrent"
    weights = bytearray((newer / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newer / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="checkpoint-10 is damaged: model.safetensors is not what"):
        generate(newer, "a", max_new_tokens=2)
    assert generate(tmp_path, "a", max_new_tokens=2).cache == "key-value"
    assert "checkpoint-10 is left out: model.safetensors is not" in capsys.readouterr().err
    newer.rename(tmp_path / "checkpoint-10.damaged")
    with pytest.raises(ValueError, match="checkpoint-10.damaged is damaged"):
        generate(tmp_path / "checkpoint-10.damaged", "a", max_new_tokens=2)
    (older / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="No checkpoint in .* is intact"):
        generate(tmp_path, "a", max_new_tokens=2)


def test_a_run_may_replace_its_checkpoints_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").touch()
    seal(saved(tmp_path / "checkpoint-9", "norm"))
    look = checkpoint.newest_whole

    def late(checkpoints: list[Path]) -> Any:
        if (tmp_path / "checkpoint-9").exists():
            (tmp_path / "checkpoint-9").rename(tmp_path / "checkpoint-10")
        return look(checkpoints)

    monkeypatch.setattr(checkpoint, "newest_whole", late)
    assert model_folder(tmp_path) == tmp_path / "checkpoint-10"


def test_a_folder_that_is_gone_is_not_asked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """owner/name would be a repository of the Hub, of whosoever."""

    def asked(*_: object, **__: object) -> None:
        pytest.fail("the network was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr("socket.getaddrinfo", asked)
    with pytest.raises(ValueError, match="Cannot load the model in run/checkpoint-10"):
        load_model(Path("run/checkpoint-10"))
    with pytest.raises(ValueError, match="Cannot load the tokenizer 'run/checkpoint-10'"):
        load_tokenizer("run/checkpoint-10", local=True)


def test_a_prompt_is_tokenised_as_in_training(tmp_path: Path) -> None:
    """Without the special tokens that a tokenizer's template adds: an end would end it at once."""
    model = saved(tmp_path, "norm")
    plain = generate(model, "a", max_new_tokens=3)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(model)
    assert generate(model, "a", max_new_tokens=3) == plain
    with pytest.raises(ValueError, match="gives no token"):
        generate(model, "")


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no model"):
        generate(tmp_path / "nothing", "a")
    model = saved(tmp_path / "ours", "norm")
    with pytest.raises(ValueError, match="Did you mean 'recurrent'"):
        generate(model, "a", cache="recurent")
    with pytest.raises(ValueError, match="needs a finite series without a clamp"):
        generate(model, "a", cache="recurrent")
    with pytest.raises(ValueError, match="gives no token"):
        generate(model, "")
    with pytest.raises(ValueError, match="temperature must be >= 0, not -1"):
        generate(model, "a", temperature=-1)
    with pytest.raises(ValueError, match="top_k=5 must be at least 1, and needs a temperature"):
        generate(model, "a", top_k=5)
    with pytest.raises(ValueError, match="max_new_tokens must be >= 1, not 0"):
        generate(model, "a", max_new_tokens=0)


@pytest.mark.parametrize("family", ["Llama", "Lfm2"])
def test_a_converted_model_continues_a_prompt(family: str, tmp_path: Path) -> None:
    """Also one of a family in which other layers have no attention, and its source."""
    mixed = {"layer_types": ["conv", "full_attention"]} if family == "Lfm2" else {}
    source = save_source(tmp_path / "source", family, eos_token_id=None, **mixed)
    plain = generate(source, "def ", max_new_tokens=9)
    assert plain.cache == "key-value"
    assert len(plain.text) > 0
    with pytest.raises(ValueError, match=f"this {family}ForCausalLM has none"):
        generate(source, "def ", cache="recurrent")
    layers = [1] if mixed else None
    for name, kind in (("taylor:1", "recurrent"), ("window:4", "key-value")):
        model = convert(load_model(source), name, layers)
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        given = functools.partial(generate, tmp_path / name, "def ", max_new_tokens=9)
        auto = given(streamed=True)
        assert auto.cache == kind
        assert given(cache=kind).text == given(cache="none").text == auto.text
        assert auto.cache_bytes > 0
        assert f"cache: {kind}, {bytes_text(auto.cache_bytes)} after 13 tokens" in str(auto)


def test_a_model_of_a_task_continues_its_tokens(tmp_path: Path) -> None:
    """Its tokens are numbers, and none of them ends a text."""
    build("taylor:2", vocab_size=8, eos_token_id=None, bos_token_id=None).save_pretrained(tmp_path)
    task_tokenizer(8).save_pretrained(tmp_path)
    found = generate(tmp_path, "3 7 0", max_new_tokens=4, streamed=True)
    assert [0 <= int(word) < 8 for word in found.text.split()] == [True] * 4
    assert found.tokens == 7
    with pytest.raises(ValueError, match="'3 def 0' has a word that is no token of"):
        generate(tmp_path, "3 def 0")
