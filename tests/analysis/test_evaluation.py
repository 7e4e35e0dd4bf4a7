"""Losses on held-out text and tasks, against the run's own and the definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import softmax_rnn as sr
from softmax_rnn.analysis.evaluation import evaluate, losses
from softmax_rnn.data.tokenizer import byte_tokenizer
from softmax_rnn.training import train
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.opening import open_model
from sources import save_source
from tiny import tiny


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of another library, with bytes as tokens."""
    return save_source(tmp_path / "llama", max_position_embeddings=48)


def _run(texts: Path, path: Path, **fields: Any) -> RunFolder:
    return train(tiny(texts, steps=2, evaluate_every=2, **fields), path)


@pytest.mark.parametrize("packing", ["blocks", "documents"])
def test_a_run_on_its_own_test_split(packing: str, texts: Path, tmp_path: Path) -> None:
    run = _run(texts, tmp_path / "run", attention="taylor:2", packing=packing)
    opened = open_model(str(run.path))
    found = evaluate(opened, batch_size=5)
    summary = found.summary()
    assert summary["loss"] == pytest.approx(run.summary["test_loss"], abs=1e-6)
    assert summary["accuracy"] == pytest.approx(run.summary["test_accuracy"], abs=1e-9)
    assert summary["rows"] == summary["rows_of_split"] == len(run.test_losses)
    each = found.found.losses.double().sum(1) / found.found.predicted.sum(1)
    assert each.numpy() == pytest.approx(run.test_losses, abs=1e-6)
    positions = summary["positions"]
    assert sum(bucket["tokens"] for bucket in positions) == summary["tokens"]
    mean = sum(bucket["tokens"] * bucket["loss"] for bucket in positions) / summary["tokens"]
    assert mean == pytest.approx(summary["loss"])
    assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
    # Every token is a byte, but for the ends of texts.
    assert summary["bytes"] == summary["tokens"] - summary["end_of_text_tokens"]
    bits = summary["loss"] / math.log(2) * summary["tokens"] / summary["bytes"]
    assert summary["bits_per_byte"] == pytest.approx(bits)


def test_figures_by_hand(llama: Path, texts: Path) -> None:
    opened = open_model(str(llama))
    found = evaluate(opened, corpus=str(texts), test_fraction=0.2, blocks=3)
    summary = found.summary()
    assert (summary["block_size"], summary["rows"]) == (48, 3)
    values, ends = found.found.losses.double().numpy(), found.ends
    assert summary["loss"] == pytest.approx(values.mean())
    error = values.mean(1).std(ddof=1) / math.sqrt(3)
    assert summary["loss_standard_error"] == pytest.approx(error)
    assert summary["positions"][0] == {
        "from": 1,
        "to": 1,
        "tokens": 3,
        "loss": pytest.approx(values[:, 0].mean()),
        "loss_standard_error": pytest.approx(values[:, 0].std(ddof=1) / math.sqrt(3)),
    }
    assert summary["positions"][-1]["to"] == 47
    assert [bucket["from"] for bucket in summary["positions"][1:]] == [
        bucket["to"] + 1 for bucket in summary["positions"][:-1]
    ]
    if ends.any():
        assert summary["end_of_text_loss"] == pytest.approx(values[ends].mean())
    single = evaluate(opened, corpus=str(texts), test_fraction=0.2, blocks=1).summary()
    assert single["loss_standard_error"] is None
    assert single["loss"] == pytest.approx(values[0].mean(), abs=1e-6)


def test_another_end_of_text(llama: Path, texts: Path) -> None:
    opened = open_model(str(llama))
    options: dict[str, Any] = {"corpus": str(texts), "test_fraction": 0.2}
    usual = evaluate(opened, **options)
    other = evaluate(opened, **options, end_of_text="!").summary()
    assert usual.end_of_text == "<|endoftext|>"
    assert other["end_of_text"] == "!"
    assert other["end_of_text_tokens"] == usual.summary()["end_of_text_tokens"] > 0
    values, ends = usual.found.losses.double().numpy(), usual.ends
    assert usual.summary()["end_of_text_loss"] == pytest.approx(values[ends].mean())
    assert other["loss"] != usual.summary()["loss"]


def test_a_converted_model(llama: Path, texts: Path, tmp_path: Path) -> None:
    opened = open_model(str(llama))
    converted = sr.convert(opened.model, "taylor:2")
    converted.save_pretrained(tmp_path / "converted")
    byte_tokenizer().save_pretrained(tmp_path / "converted")
    again = open_model(str(tmp_path / "converted"))
    options: dict[str, Any] = {"corpus": str(texts), "test_fraction": 0.2, "blocks": 2}
    found = evaluate(again, **options)
    direct = evaluate(opened._replace(model=converted), **options)
    assert torch.equal(found.found.losses, direct.found.losses)
    assert found.summary()["loss"] != evaluate(open_model(str(llama)), **options).summary()["loss"]


def test_a_task(tmp_path: Path) -> None:
    fields = {"corpus": "task:mqar?pairs=2&vocab=16", "block_size": 16, "attention": "norm"}
    run = train(tiny(tmp_path, **fields, steps=2, evaluate_every=2), tmp_path / "run")
    found = evaluate(open_model(str(run.path)), batch_size=100)
    summary = found.summary()
    assert summary["loss"] == pytest.approx(run.summary["test_loss"], abs=1e-6)
    assert summary["accuracy"] == pytest.approx(run.summary["test_accuracy"], abs=1e-9)
    assert summary["tokens"] == 2 * 512
    assert "bits_per_byte" not in summary
    few = evaluate(open_model(str(run.path)), blocks=4).summary()
    assert (few["rows"], few["tokens"]) == (4, 8)


def test_a_text_that_has_changed(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(texts, tmp_path / "run")
    evaluate(open_model(str(run.path)))
    assert "has changed" not in capsys.readouterr().err
    (texts / "00.txt").write_text("other words " * 30)
    evaluate(open_model(str(run.path)))
    assert "has changed since the run was trained (" in capsys.readouterr().err


def _rows(count: int, length: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def _gpt2(vocabulary: int = 50) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=16,
        n_embd=8,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)  # in training mode, with dropout


def test_the_batch_size_changes_nothing() -> None:
    model, seen = _gpt2(), []
    rows = _rows(5, 16, 50)
    one = losses(model, rows)
    two = losses(model, rows, batch_size=2, progress=seen.append)
    assert seen == [2, 4, 5]
    assert one.losses.shape == (5, 15)
    torch.testing.assert_close(one.losses, two.losses, rtol=0, atol=1e-5)
    with torch.no_grad():
        ids = rows[3]["input_ids"]
        chances = model.double()(ids[None]).logits[0].log_softmax(-1)
    expected = -chances[np.arange(15), ids[1:]]
    torch.testing.assert_close(one.losses[3].double(), expected, rtol=0, atol=1e-5)


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="A row holds the token 59, but the model has 50 tokens"):
        losses(_gpt2(), [{name: torch.tensor([1, 59]) for name in ("input_ids", "labels")}])
    with pytest.raises(ValueError, match="cannot read rows of 17 tokens .*smaller block_size"):
        losses(_gpt2(), _rows(1, 17, 50))
    broken = _gpt2()
    torch.nn.init.constant_(broken.transformer.wte.weight[7], math.nan)
    rows = [
        {name: torch.tensor(ids) for name in ("input_ids", "labels")}
        for ids in ([1, 2], [3, 4], [7, 4])
    ]
    with pytest.raises(FloatingPointError, match="of a token of row 2 is not finite"):
        losses(broken, rows, batch_size=3)


def test_invalid_settings(llama: Path, texts: Path) -> None:
    opened = open_model(str(llama))
    with pytest.raises(ValueError, match="so it needs corpus=NAME"):
        evaluate(opened)
    for name in ("blocks", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, not 0"):
            evaluate(opened, corpus=str(texts), **{name: 0})
    with pytest.raises(ValueError, match="block_size"):
        evaluate(opened, corpus=str(texts), block_size=1)
