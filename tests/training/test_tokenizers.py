"""Runs with tokenizers other than bytes: without padding, and without an end of text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from softmax_rnn.cli.generate import generate
from softmax_rnn.cli.main import main
from softmax_rnn.data import load_tokenizer, prepare
from softmax_rnn.training import train
from softmax_rnn.training.run import load_corpus
from tiny import options, tiny


@pytest.fixture
def llama_like(tmp_path: Path) -> Path:
    """As Llama-2's: pieces, bytes for all else, a start in its template, no padding."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aegmnoqrstuwy", "▁s"]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[("▁", "s")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def endless(llama_like: Path) -> Path:
    """The same, which names neither padding nor an end."""
    fast = PreTrainedTokenizerFast(tokenizer_file=str(llama_like / "tokenizer.json"))
    fast.save_pretrained(llama_like.with_name("endless"))
    return llama_like.with_name("endless")


@pytest.mark.parametrize("packing", ["blocks", "documents"])
def test_a_tokenizer_without_padding(
    packing: str, llama_like: Path, texts: Path, tmp_path: Path
) -> None:
    config = tiny(texts, tokenizer=str(llama_like), packing=packing, attention="taylor:2")
    folder = train(config, tmp_path / "run")
    assert folder.metrics.loss.iloc[-1] < folder.metrics.loss.iloc[0]
    saved = AutoTokenizer.from_pretrained(folder.checkpoints[-1])
    assert (saved.eos_token, saved.pad_token) == ("</s>", None)
    made = generate(folder.path, "state query", max_new_tokens=5)
    assert made.tokens == len(saved.tokenize("state query")) + 5


def test_compare_with_a_tokenizer_without_padding(
    llama_like: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    words = ["compare", "softmax", "norm", *options(texts, out, tokenizer=llama_like)]
    assert main(words) == 0, capsys.readouterr().err
    assert "minus softmax" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["train"], ["compare", "softmax"], ["prepare"]])
def test_without_an_end_of_text_nothing_is_prepared(
    words: list[str],
    endless: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path / "cache"))
    given = ["--corpus", str(texts)] if words != ["prepare"] else [str(texts)]
    words = [*words, *given, "--tokenizer", str(endless)]
    if words[0] != "prepare":
        words += ["--out", str(tmp_path / "run")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "no end-of-text token to end documents with: name one of its tokens with" in told
    assert "--end-of-text. Its special tokens: <unk>, <s>, </s>." in told
    assert main([*words, "--end-of-text", "</ss>"]) == 2
    told = capsys.readouterr().err
    assert "has no token '</ss>' to end documents with. Did you mean '</s>'?" in told
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("token", "number"), [("</s>", 2), ("▁", 259)])
def test_an_end_of_text_can_be_named(
    token: str, number: int, endless: Path, texts: Path, tmp_path: Path
) -> None:
    config = tiny(texts, tokenizer=str(endless), end_of_text=token, steps=4)
    folder = train(config, tmp_path / "run")
    corpus = load_corpus(config)
    assert corpus.manifest["end_of_text"] == number
    assert corpus.tokens("train")[:][-1] == number
    # The checkpoint's tokenizer names it too, and so makes the same corpus.
    saved = load_tokenizer(str(folder.checkpoints[-1]), local=True)
    assert saved.eos_token_id == number
    again = prepare(str(texts), saved, test_fraction=config.test_fraction)
    assert again.manifest["train"]["sha256"] == corpus.manifest["train"]["sha256"]
    generate(folder.path, "state", max_new_tokens=3)


def test_another_end_of_text_is_another_corpus(llama_like: Path, texts: Path) -> None:
    folders = []
    for token in (None, "</s>", "<s>"):
        config = tiny(texts, tokenizer=str(llama_like), end_of_text=token)
        folders.append(load_corpus(config).folder)
    assert folders[0] == folders[1] != folders[2]
    config = tiny(folders[0], tokenizer=str(llama_like), end_of_text="<s>")
    with pytest.raises(ValueError, match=re.escape("end_of_text=2 (requested: 1)")):
        load_corpus(config)
