"""Runs with a document a row."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from softmax_rnn.data import (
    DocumentRows,
    SegmentedBlocks,
    ValidationCorpus,
    load_tokenizer,
    prepare,
)
from softmax_rnn.models import SoftmaxRNNForCausalLM, initialize
from softmax_rnn.training import train
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.metrics import MetricRows
from softmax_rnn.training.run import model_config
from tiny import tiny


@pytest.fixture
def lengths(texts: Path) -> Path:
    """Documents of 6 to 45 tokens, in rows of 32."""
    for i, path in enumerate(sorted(texts.iterdir())):
        path.write_text(path.read_text()[: 5 + i])
    return texts


@pytest.mark.parametrize("attention", ["softmax", "gate"])
def test_a_document_a_row_counts_and_learns_from_its_tokens_alone(
    lengths: Path, tmp_path: Path, attention: str
) -> None:
    """Half of the tokens of a batch are padding: nothing of it is in a loss or a count."""
    config = tiny(lengths, attention=attention, packing="documents", steps=6, save_every=6)
    folder = train(config, tmp_path / "run")
    corpus = prepare(str(lengths), load_tokenizer("bytes"), test_fraction=config.test_fraction)
    train_rows = DocumentRows(corpus, "train", config.block_size)
    seen = [train_rows[train_rows.drawn(config.seed, i)] for i in range(24)]
    batches = [[seen[4 * step + i] for i in range(4)] for step in range(6)]
    tokens = [int(sum(row["attention_mask"].sum() for row in batch)) for batch in batches]
    assert 0.2 < sum(tokens) / (6 * config.tokens_per_step) < 0.9
    assert list(folder.metrics.tokens) == list(np.cumsum(tokens)[1::2])
    assert folder.summary["tokens"] == sum(tokens)
    # The test loss is the mean over real tokens, each document read without its padding.
    model = AutoModelForCausalLM.from_pretrained(folder.checkpoints[-1]).eval()
    rows = DocumentRows(corpus, "test", config.block_size)
    losses = []
    with torch.no_grad():
        for row in [rows[i] for i in range(len(rows))]:
            ids = row["input_ids"][: int(row["attention_mask"].sum())]
            logits = model(ids[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, ids[1:], reduction="none"))
    np.testing.assert_allclose(folder.test_losses, [loss.mean() for loss in losses], rtol=1e-4)
    assert folder.summary["test_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    # The first step's loss, of the untrained model, likewise: padding is in no mean.
    model = SoftmaxRNNForCausalLM(model_config(config, 257, 256))
    initialize(model, config.seed)
    losses = []
    with torch.no_grad():
        for row in batches[0]:
            ids = row["input_ids"][: int(row["attention_mask"].sum())]
            losses.append(
                F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
            )
    once = train(tiny(lengths, **{**vars(config), "steps": 1, "log_every": 1}), tmp_path / "one")
    expected = sum(losses) / (tokens[0] - 4)
    assert once.metrics.loss.iloc[0] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("validation", [False, True])
def test_blocks_of_segments_are_the_documents(lengths: Path, validation: bool) -> None:
    """Every document is in its blocks again, begins at position 0, and is predicted after it."""
    corpus = prepare(str(lengths), load_tokenizer("bytes"), test_fraction=0.2)
    if validation:
        corpus = ValidationCorpus.of(corpus, 0.2, 1)
    block, ends = 32, corpus.manifest["end_of_text"]
    for split in ("train", "test"):
        rows = SegmentedBlocks(corpus, split, block)
        stream = torch.cat([rows[i]["input_ids"] for i in range(len(rows))])
        positions = torch.cat([rows[i]["position_ids"] for i in range(len(rows))])
        labels = torch.cat([rows[i]["labels"] for i in range(len(rows))])
        begins = torch.zeros(len(stream), dtype=torch.bool)
        begins[1:] = stream[:-1] == ends
        assert begins.sum() > 3
        expected, last = [], 0
        for place in range(len(stream)):
            last = place if begins[place] or place % block == 0 else last
            expected.append(place - last)
        assert positions.tolist() == expected
        inner = begins & (torch.arange(len(stream)) % block > 0)
        assert torch.equal(labels, stream.masked_fill(inner, -100))
        drawn = rows.drawn_rows(3, 5, 30)
        counted = sum(int((row["labels"][1:] != -100).sum()) for row in drawn)
        assert rows.predicted(3, 5, 30) == counted


@pytest.mark.parametrize("attention", ["gate", "mamba2", "window_taylor:2"])
def test_segments_learn_from_each_document_alone(
    lengths: Path, tmp_path: Path, attention: str
) -> None:
    fields = {"attention": attention, "packing": "segments", "steps": 1, "log_every": 1}
    config = tiny(lengths, **fields, save_every=1, evaluate_every=1)
    folder = train(config, tmp_path / "run")
    corpus = prepare(str(lengths), load_tokenizer("bytes"), test_fraction=config.test_fraction)
    model = SoftmaxRNNForCausalLM(model_config(config, 257, 256))
    initialize(model, config.seed)

    def losses(row: dict[str, torch.Tensor]) -> torch.Tensor:
        begins = torch.where(row["position_ids"] == 0)[0].tolist()
        found = []
        for first, last in zip(begins, [*begins[1:], config.block_size], strict=True):
            ids = row["input_ids"][first:last]
            logits = model(ids[None]).logits[0, :-1]
            found.append(F.cross_entropy(logits, ids[1:], reduction="none"))
        return torch.cat(found).detach()

    rows = SegmentedBlocks(corpus, "train", config.block_size)
    first = torch.cat([losses(row) for row in rows.drawn_rows(config.seed, 0, 4)])
    assert folder.metrics.loss.iloc[0] == pytest.approx(float(first.mean()), rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder.checkpoints[-1]).eval()
    test = SegmentedBlocks(corpus, "test", config.block_size)
    each = [losses(test[i]) for i in range(len(test))]
    np.testing.assert_allclose(folder.test_losses, [x.mean() for x in each], rtol=1e-4)


def test_segments_are_not_for_shared_blocks(texts: Path) -> None:
    with pytest.raises(ValueError, match="packing='segments' is not for blocks"):
        tiny(texts, packing="segments", context_parallel=2)


def test_documents_resumed_count_the_same_tokens(lengths: Path, tmp_path: Path) -> None:
    config = tiny(lengths, packing="documents", keep_checkpoints=9)
    expected = train(config, tmp_path / "undisturbed")
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "cut")
    cut = RunFolder(tmp_path / "cut")
    (cut.path / "summary.json").unlink()
    for path in cut.checkpoints[1:]:
        shutil.rmtree(path)
    again = train(config, cut.path, resume=True)
    timed = "tokens_per_second"
    for found, wanted in (
        (again.metrics.drop(columns=timed), expected.metrics.drop(columns=timed)),
        (again.evaluations, expected.evaluations),
    ):
        assert found.equals(wanted)


def test_the_speed_after_a_resume_is_of_this_session(lengths: Path, tmp_path: Path) -> None:
    config = tiny(lengths, packing="documents")
    rows = MetricRows(config, RunFolder(tmp_path), lambda start, stop: 10 * (stop - start))
    rows.steps, rows.seconds = 2, 4.0  # two steps since the checkpoint of step 4
    rows.add(6, 1.0, learning_rate=1.0, grad_norm=1.0)
    row = RunFolder(tmp_path).metrics.iloc[0]
    assert row.tokens == 10 * 6 * config.batch_size
    assert row.tokens_per_second == 10 * 2 * config.batch_size / 4.0
