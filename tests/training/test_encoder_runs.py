"""Runs of encoders: on hidden tokens of text, and on tasks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from softmax_rnn.cli.main import main
from softmax_rnn.training import train
from softmax_rnn.training.losses import token_losses
from softmax_rnn.training.run import load_rows
from tiny import TINY, rows, tiny


def test_a_run_on_hidden_tokens(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(texts, attention="taylor:2+decay", causal=False, learning_rate=1e-2)
    folder = train(config, tmp_path / "run")
    assert rows(train(config, tmp_path / "again")) == rows(folder)
    assert folder.metrics.loss.iloc[-1] < folder.metrics.loss.iloc[0]
    model = AutoModelForMaskedLM.from_pretrained(folder.checkpoints[-1]).eval()
    assert model.config.vocab_size == 258  # bytes, the end of a text, and what hides a token
    first = load_rows(config)[2][0]
    with torch.no_grad():
        ids, labels = first["input_ids"][None], first["labels"][None]
        loss = model(input_ids=ids, labels=labels).loss
    assert float(loss) == pytest.approx(float(folder.test_losses[0]), rel=1e-5)
    for command in ("generate", "evaluate", "analyze"):  # of decoders
        options = ["--prompt", "a"] if command == "generate" else []
        assert main([command, str(folder.path), *options]) == 2
        assert "an encoder (is_causal=False) is loaded by" in capsys.readouterr().err
    # Hidden tokens are predicted from later ones as well, up to the block's end.
    place = int((labels[0] != -100).nonzero()[0])
    with torch.no_grad():
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 256
        moved = model(input_ids=changed).logits[0, place] - model(input_ids=ids).logits[0, place]
    assert moved.abs().max() > 0


class _Knows(nn.Module):
    """Predicts each token of its input in the token's own place."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_causal=is_causal)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=20.0 * nn.functional.one_hot(input_ids, 9).double())


def test_an_encoder_is_asked_in_the_place_of_a_token_and_a_decoder_before_it() -> None:
    ids = torch.arange(1, 9).unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 4, -100)}
    found = token_losses(_Knows(is_causal=False), batch)
    assert found.right.tolist() == found.predicted.tolist() == (ids != 4).tolist()
    assert found.losses[found.predicted].max() < 1e-6
    causal = token_losses(_Knows(is_causal=True), batch)
    assert not causal.right.any()
    assert causal.losses[causal.predicted].min() > 10


def test_what_an_encoder_cannot_be_trained_on() -> None:
    with pytest.raises(ValueError, match=r"causal=false needs packing='blocks', not 'documents'"):
        tiny(Path("x"), causal=False, packing="documents")


def test_an_encoder_learns_a_task_of_both_directions(tmp_path: Path) -> None:
    """Which token is the largest of a short list."""
    fields: dict[str, Any] = {**TINY, "steps": 60, "batch_size": 32, "num_layers": 1}
    fields |= {"block_size": 6, "learning_rate": 1e-2, "log_every": 10, "evaluate_every": 60}
    config = tiny(Path("task:listops"), **{**fields, "save_every": 60}, causal=False)
    folder = train(config, tmp_path / "run")
    assert folder.evaluations.test_accuracy.iloc[-1] > 0.2
