"""Models from every source that ``open_model`` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import softmax_rnn.models.loading as loading
from softmax_rnn.data import load_tokenizer
from softmax_rnn.data.tokenizer import END_OF_TEXT, byte_tokenizer
from softmax_rnn.training import train
from softmax_rnn.training.opening import open_model
from sources import SIZES
from tiny import tiny

IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5)).eval()


@torch.no_grad()
def _logits(model: torch.nn.Module) -> Tensor:
    return model(IDS).logits


def test_a_folder_of_another_library(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    opened = open_model(str(tmp_path))
    assert torch.equal(_logits(opened.model), _logits(llama))
    assert not opened.model.training
    assert opened.run is None
    assert opened.tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    again = load_tokenizer(opened.tokenizer_name, local=True)
    assert again.eos_token_id == opened.tokenizer.eos_token_id == 256
    assert open_model(str(tmp_path), end_of_text="a").tokenizer.eos_token_id == 97
    with pytest.raises(ValueError, match="Did you mean '<|endoftext|>'"):
        open_model(str(tmp_path), end_of_text="<|endoftxt|>")


def test_a_run_and_its_checkpoint(texts: Path, tmp_path: Path) -> None:
    run = train(tiny(texts, attention="norm", steps=2, evaluate_every=2), tmp_path / "run")
    opened = open_model(str(run.path))
    assert opened.run is not None
    assert opened.run.path == run.path
    assert opened.tokenizer_name == str(run.checkpoints[-1])
    assert opened.tokenizer.eos_token == END_OF_TEXT
    checkpoint = open_model(opened.tokenizer_name)
    assert checkpoint.run is not None
    assert checkpoint.run.path == run.path
    assert torch.equal(_logits(checkpoint.model), _logits(opened.model))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere holds no model"):
        open_model(str(tmp_path / "nowhere"))
    (tmp_path / "norm-seed0").mkdir()
    (tmp_path / "norm-seed0" / "config.yaml").touch()
    with pytest.raises(FileNotFoundError, match="Name one of its runs: norm-seed0"):
        open_model(str(tmp_path))
    with pytest.raises(ValueError, match="Cannot load the model in .*nothing.gguf"):
        open_model(str(tmp_path / "nothing.gguf"))
    # The tests are offline.
    with pytest.raises(ValueError, match="Cannot load the model in hf:nobody/nothing: OSError"):
        open_model("hf:nobody/nothing")


def test_gguf_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    told = r"model.gguf needs the package 'gguf': pip install 'softmax-rnn\[gguf\]'\."
    with pytest.raises(ModuleNotFoundError, match=told):
        open_model(str(tmp_path / "model.gguf"))


def test_a_gguf_file(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    path = tmp_path / "tiny.gguf"
    _write(gguf, llama, path)
    opened = open_model(str(path))
    assert opened.run is None
    assert opened.tokenizer_name == str(path)
    torch.testing.assert_close(_logits(opened.model), _logits(llama), rtol=0, atol=1e-6)
    assert opened.model.dtype == torch.float32
    ids = opened.tokenizer.encode("aé", add_special_tokens=False)
    assert ids == [97, 0xC3, 0xA9]
    assert opened.tokenizer.decode(ids) == "aé"
    assert opened.tokenizer.eos_token_id == 256


def _write(gguf, model: LlamaForCausalLM, path: Path) -> None:  # type: ignore[no-untyped-def]
    """A Llama in a file as llama.cpp writes it, in float32, with bytes as tokens."""
    config, arch = model.config, gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = byte_tokenizer().get_vocab()
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([normal] * 256 + [control])
    writer.add_token_scores([0.0] * 257)  # in place of merges, of which there are none
    writer.add_eos_token_id(256)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:  # the two halves of a head's channels take turns
                halves = values.reshape(count, 2, -1, values.shape[1])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
