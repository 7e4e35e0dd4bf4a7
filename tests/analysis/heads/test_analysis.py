"""Every statistic of ``analyze`` against loops in float64 over what the layers really compute."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import softmax_rnn as sr
from head_loops import MAX_ORDER, ORDER, ORDERS, TOLERANCE, Call, by_loops
from softmax_rnn.analysis.heads import orders, terms
from softmax_rnn.analysis.heads.analyze import analyze, analyze_checkpoint
from softmax_rnn.analysis.heads.figure import draw
from softmax_rnn.analysis.heads.result import Analysis, write
from softmax_rnn.analysis.heads.table import table
from softmax_rnn.data import TaskRows, TokenBlocks, parse_task
from softmax_rnn.data.tokenizer import byte_tokenizer
from softmax_rnn.ops.layer import core as layer_module
from softmax_rnn.training import RunConfig, train
from softmax_rnn.training.run import load_corpus
from test_modeling import build
from tiny import tiny

IDS = torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(1))
SPECS: dict[str, object] = {
    **{name: name for name in ("softmax", "norm", "gate", "both_gates", "taylor:2", "power:3")},
    **{name: name for name in ("linear_elu", "linear_relu", "linear_cosine")},
    **{name: name for name in ("forgetting", "retnet", "gla", "window:4+decay", "window_taylor:2")},
    **{name: name for name in ("mamba2", "cosformer", "attention_sink", "lolcats:3")},
    "global keys": sr.AttentionSpec(window=3, global_keys=2).to_dict(),
    "low clamp": sr.AttentionSpec(clamp=-0.5).to_dict(),
    "negative scale": sr.AttentionSpec(feature_map="elu1", scale=-0.3, clamp=9.0).to_dict(),
}


def model_of(attention: object, **fields: object) -> sr.SoftmaxRNNForCausalLM:
    """A tiny model in float64, with scores of several units."""
    return build(attention, initializer_range=0.03, **fields).double()


def captured(
    model: sr.SoftmaxRNNForCausalLM, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> list[Call]:
    """The q, k, v and log decay that each layer hands to ``attention``."""
    calls = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        calls.append((q, k, v, options["log_decay"]))
        return sr.attention(q, k, v, *args, **options)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(layer_module, "attention", spy)
        model(input_ids=IDS, attention_mask=mask, use_cache=False)
    return calls


def check(
    model: sr.SoftmaxRNNForCausalLM, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> Analysis:
    found = analyze(model, IDS, mask=mask, order=ORDER, tolerance=TOLERANCE, max_order=MAX_ORDER)
    shown = torch.ones_like(IDS) if mask is None else mask
    assert found.tokens == shown.sum()
    for index, call in enumerate(captured(model, mask, monkeypatch)):
        for head in range(4):
            expected = by_loops(call, model.config.spec, head, shown)
            here = found.heads.query(f"layer == {index} and head == {head}")
            powers = found.powers.query(f"layer == {index} and head == {head}")
            assert len(here) == 1
            assert list(powers.power) == list(range(ORDER + 1))
            for name in ("max_score", "p99_score", "mean_score", "max_radius"):
                np.testing.assert_allclose(here[name], expected[name], rtol=1e-9, err_msg=name)
            for name in (*ORDERS, "order_bound"):
                value = here[name].iloc[0]
                assert value is expected[name] or value == expected[name], name
            for name in ("term", "share", "pair_share", "numerator", "error"):
                np.testing.assert_allclose(powers[name], expected[name], rtol=1e-7, atol=1e-12)
            with np.errstate(divide="ignore"):
                expected_log = np.log10(expected["share"])
            np.testing.assert_allclose(powers.log10_share, expected_log, atol=1e-9)
    return found


@pytest.mark.parametrize("name", SPECS)
def test_every_statistic_is_that_of_the_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads on two key/value heads; rows in several steps."""
    monkeypatch.setattr(terms, "_ROWS", 4)
    model = model_of(SPECS[name])
    found = check(model, None, monkeypatch)
    assert found.specs == {0: model.config.spec, 1: model.config.spec}
    if name == "softmax":
        assert found.heads.max_score.min() > 3  # else little was put to the test
        assert found.heads.order_needed.min() > 3


@pytest.mark.parametrize("name", ["softmax", "forgetting", "gla", "window:4+decay", "global keys"])
def test_padding_is_neither_query_nor_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :4], mask[1, 7:], mask[2, 0], mask[2, 5] = 0, 0, 0, 0
    monkeypatch.setattr(terms, "_ROWS", 4)
    model = model_of(SPECS.get(name, name), layer_options={"short_convolution": 3})
    with torch.no_grad():
        for field, parameter in model.named_parameters():
            if "short_convolution" in field:  # at first it is the identity
                parameter.fill_(0.4)
    masked = check(model, mask, monkeypatch)
    other = torch.where(mask.bool(), IDS, (IDS + 7) % 61)
    options = {"order": ORDER, "tolerance": TOLERANCE, "max_order": MAX_ORDER}
    again = analyze(model, other, mask=mask, **options)
    pd.testing.assert_frame_equal(masked.powers, again.powers)


def test_the_future_is_not_seen() -> None:
    model, ids = model_of("softmax"), IDS[:1].clone()
    before = analyze(model, ids[:, :6])
    ids[:, 6:] = 3
    shown = torch.ones_like(ids)
    shown[:, 6:] = 0
    after = analyze(model, ids, mask=shown)
    for a, b in ((before.heads, after.heads), (before.powers, after.powers)):
        pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize("attention", ["softmax", "taylor:2", "gate"])
def test_a_float32_model_gives_the_same(attention: str) -> None:
    model = model_of(attention)
    exact, found = analyze(model, IDS), analyze(model.float(), IDS)
    pd.testing.assert_frame_equal(exact.powers, found.powers, rtol=1e-3, atol=1e-6)


def test_shares_of_many_powers_add_up_to_one() -> None:
    powers = analyze(model_of("softmax"), IDS, order=60).powers
    sums = powers.groupby(["layer", "head"])[["share", "pair_share"]].sum()
    np.testing.assert_allclose(sums, 1.0, rtol=1e-12)


@pytest.mark.parametrize("attention", ["softmax", "forgetting"])
def test_stopping_early_changes_nothing(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, frames = [], terms.LayerTerms.frames

    def spy(self: terms.LayerTerms, *args: Any) -> tuple[pd.DataFrame, pd.DataFrame]:
        errors.append(torch.stack(list(self.errors.values())) / 33)
        return frames(self, *args)

    monkeypatch.setattr(terms.LayerTerms, "frames", spy)
    model = model_of(attention)
    analyze(model, IDS, max_order=101)
    monkeypatch.setattr(orders, "_NEGLIGIBLE", -1.0)
    analyze(model, IDS, max_order=101)
    torch.testing.assert_close(torch.cat(errors[:2]), torch.cat(errors[2:]), rtol=1e-9, atol=1e-12)
    assert errors[0][..., 0].min() > TOLERANCE


def test_huge_scores_overflow_nothing() -> None:
    """Scores of thousands: no order is enough, no bound exists, shares vanish."""
    found = analyze(build("linear_relu", initializer_range=0.4), IDS, max_order=20)
    assert found.heads.max_score.max() > 1000
    large = found.heads[found.heads.max_score > 700]
    assert large.order_bound.isna().all()
    assert large[[*ORDERS]].isna().all(axis=None)
    assert not found.powers.isna().any(axis=None)
    assert np.isfinite(found.powers.drop(columns="log10_share")).all(axis=None)
    assert any("> 20" in line for line in printed(found))


def test_the_model_is_left_as_it_was() -> None:
    model = model_of("softmax").train()
    analyze(model, IDS)
    assert model.training
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"A score of layer 0 is not fin"):
        analyze(model, IDS)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_progress_ends_at_one() -> None:
    seen: list[float] = []
    analyze(model_of("softmax"), IDS, progress=seen.append)
    assert seen == [(i + 1) / 6 for i in range(6)]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS[0], {}, r"ids must be integers of shape \[N, T\].* not torch.int64 of shape \[11\]"),
        (IDS[:0], {}, r"N and T at least 1.* of shape \[0, 11\]"),
        (IDS.float(), {}, r"ids must be integers .* not torch.float32"),
        (IDS + 10, {}, r"ids must be in \[0, 60\] for this model; found 69"),
        (IDS - 70, {}, r"ids must be in \[0, 60\] for this model; found -70"),
        (IDS, {"mask": torch.ones(3)}, r"mask must have the shape \[3, 11\] of ids, not \[3\]"),
        (IDS, {"mask": torch.eye(3, 11) * torch.tensor([[1], [0], [1]])}, "all of sequence 1"),
        (IDS, {"order": -1}, "order must be an integer >= 0, not -1"),
        (IDS, {"order": True}, "order must be an integer >= 0, not True"),
        (IDS, {"max_order": 2.5}, "max_order must be an integer >= 0, not 2.5"),
        (IDS, {"tolerance": 0}, "tolerance must be a finite number > 0, not 0"),
        (IDS, {"tolerance": math.nan}, "tolerance must be a finite number > 0, not nan"),
    ],
)
def test_mistakes_are_named(ids: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        analyze(build("softmax"), ids, **options)


def printed(analysis: Analysis) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(analysis))
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


@pytest.mark.parametrize("order", [0, 1, 10])
def test_the_table_lines_up(order: int) -> None:
    found = analyze(model_of("softmax"), IDS, order=order)
    header, _, *rows = printed(found)
    caption = " ".join(rows[8:])
    rows = rows[:8]
    assert "within 0.01 of softmax's" in " ".join(caption.split())
    assert "on 33 tokens" in " ".join(caption.split())
    assert {len(row) for row in rows} == {len(header)}
    assert f"{min(order, 2) + 1} and up" in header
    first = next(found.heads.itertuples())
    assert rows[0].split()[2] == f"{first.max_score:.2f}"
    columns = ("order_bound", *ORDERS)
    assert rows[0].split()[-4:] == [str(getattr(first, name)) for name in columns]
    shares = [float(cell[:-1]) for cell in rows[0].split() if cell.endswith("%")]
    assert sum(shares[:-2]) == pytest.approx(100, abs=0.3)  # after them: first, last 16


def test_files_hold_what_was_found(tmp_path: Path) -> None:
    found = analyze(model_of("softmax"), IDS, max_order=3, order=3)
    assert found.heads.order_needed.isna().any()
    folder = tmp_path / "new" / "folder"
    paths = [*write(found, folder), *draw(found, folder, title="a model")]
    assert sorted(paths) == sorted(folder.iterdir())  # nothing is left aside
    heads, powers = (pd.read_csv(path) for path in paths[:2])
    pd.testing.assert_frame_equal(powers, found.powers)
    assert list(heads.order_needed.isna()) == list(found.heads.order_needed.isna())
    settings = json.loads(paths[2].read_text())
    assert settings == {
        "specs": {layer: sr.variant("softmax").to_dict() for layer in "01"},
        "order": 3,
        "tolerance": 0.01,
        "max_order": 3,
        "tokens": 33,
    }
    assert paths[3].read_bytes().startswith(b"\x89PNG")
    drawn = " ".join(ElementTree.parse(paths[4]).getroot().itertext())
    for text in ("a model", "power n", "more than 3", "1.3", "effective order"):
        assert text in drawn
    before = paths[4].read_bytes()
    draw(found, folder, title="a model")
    assert paths[4].read_bytes() == before


@pytest.mark.parametrize(
    ("attention", "weights"),
    [
        ("softmax", ""),
        ("clamped", ""),
        ("power:2", "(series='power', order=2)"),
        ("linear_cosine", "(series='power', order=1)"),
        ("taylor:2", "(series='taylor', order=2)"),
    ],
)
def test_weights_that_are_not_exp_are_told(attention: str, weights: str, tmp_path: Path) -> None:
    found = analyze(model_of(attention), IDS[:1, :5], order=2)
    _, svg = draw(found, tmp_path)
    for shown in (found.note, " ".join(printed(found)), " ".join(svg.read_text().split())):
        assert ("are not exp" in shown) == bool(weights)
        assert weights in shown


def test_a_panel_without_a_share_to_show_says_why(tmp_path: Path) -> None:
    found = analyze(build("linear_relu", initializer_range=0.4), IDS)
    assert found.powers.log10_share.max() < -6
    _, svg = draw(found, tmp_path)
    drawn = " ".join(ElementTree.parse(svg).getroot().itertext())
    drawn = " ".join(drawn.split())
    assert drawn.count("Not drawn: every share up to power 10 is below 1e-6.") == 1
    assert f"terms of a score of {found.heads.max_score.max():,.0f} are near" in drawn


def test_many_heads_are_shown_by_layer(tmp_path: Path) -> None:
    model = model_of("softmax", num_hidden_layers=13)
    found = analyze(model, IDS[:1, :3], max_order=2, order=2)
    heads = found.heads
    header, _, *rows = printed(found)
    assert header.split()[:3] == ["layer", "max", "|s|"]
    assert "power" not in header
    for layer, row in enumerate(rows[:13]):
        cells = re.split(r"\s{2,}", row.strip())
        assert cells[0] == str(layer)
        here = heads.query(f"layer == {layer}")
        low, high = here.max_score.min(), here.max_score.max()
        assert cells[1] == f"{low:.2f} to {high:.2f}"
        low, high = f"{here.sink_share.min():.1%}", f"{here.sink_share.max():.1%}"
        assert cells[3] == f"{low} to {high}"
        assert ("> 2" in cells[6]) == bool(here.order_needed.isna().any())
    assert heads.order_needed.isna().any()
    assert "The 4 heads of each layer, lowest to highest." in " ".join(rows[13:])
    _, svg = draw(found, tmp_path)
    drawn = " ".join(ElementTree.parse(svg).getroot().itertext())
    assert "12" in drawn
    assert "layer.head" not in drawn


def test_a_run_is_measured_on_its_own_test_split(texts: Path, tmp_path: Path) -> None:
    config = tiny(texts, attention="taylor:2", steps=4)
    run = train(config, tmp_path / "run")
    found = analyze_checkpoint(run.path, blocks=3, order=4)
    split = TokenBlocks(load_corpus(config), "test", config.block_size)
    picked = [0, round((len(split) - 1) / 2), len(split) - 1]
    ids = torch.stack([split[index]["input_ids"] for index in picked])
    model = sr.SoftmaxRNNForCausalLM.from_pretrained(run.checkpoints[-1])
    expected = analyze(model, ids, order=4)
    pd.testing.assert_frame_equal(found.heads, expected.heads)
    pd.testing.assert_frame_equal(found.powers, expected.powers)
    same = analyze_checkpoint(run.checkpoints[-1], blocks=3, order=4)
    pd.testing.assert_frame_equal(same.powers, expected.powers)
    everything = analyze_checkpoint(run.path, blocks=10**6, order=1)
    assert everything.tokens == len(split) * config.block_size


def test_padding_of_a_task_is_not_measured(tmp_path: Path) -> None:
    """Rows of 16 tokens are padded to 32."""
    corpus = "task:mqar?settings=16x2,32x4&vocab=32"
    config = RunConfig(
        corpus=corpus, block_size=32, steps=1, batch_size=2, hidden_size=16, intermediate_size=16,
        num_layers=1, num_heads=2, num_kv_heads=2,
    )  # fmt: skip
    run = train(config, tmp_path / "run")
    found = analyze_checkpoint(run.path, blocks=6, order=2)
    rows = TaskRows(parse_task(corpus, 32), "test", config.split_seed)
    chosen = np.linspace(0, len(rows) - 1, 6).round().astype(int)
    pairs = [int((rows[index]["labels"] >= 0).sum()) for index in chosen]
    lengths = [{2: 16, 4: 32}[count] for count in pairs]
    assert found.tokens == sum(lengths) < 6 * 32
    model = sr.SoftmaxRNNForCausalLM.from_pretrained(run.checkpoints[-1])
    short = [index for index, length in zip(chosen, lengths, strict=True) if length == 16]
    ids = torch.stack([rows[index]["input_ids"] for index in short])
    mask = torch.arange(32).expand(len(ids), 32) < 16
    alone, masked = analyze(model, ids[:, :16]), analyze(model, ids, mask=mask)
    pd.testing.assert_frame_equal(alone.heads, masked.heads, rtol=1e-4)


def test_a_model_outside_a_run_needs_a_corpus(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build("softmax", vocab_size=257, max_position_embeddings=16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match="is not the folder of a run, so a corpus must be given"):
        analyze_checkpoint(folder)
    given: dict[str, Any] = {"corpus": str(texts), "blocks": 2, "order": 1}
    assert analyze_checkpoint(folder, **given).tokens == 32
    assert analyze_checkpoint(folder, **given, block_size=12).tokens == 24
    with pytest.raises(ValueError, match="block_size must be at most the 16 positions"):
        analyze_checkpoint(folder, **given, block_size=17)
    with pytest.raises(ValueError, match="block_size must be an integer >= 1, not 0"):
        analyze_checkpoint(folder, **given, block_size=0)


@pytest.mark.parametrize("kind", ["a family's", "converted"])
def test_a_saved_model_of_another_family(kind: str, texts: Path, tmp_path: Path) -> None:
    """With its own tokenizer; positions are limited, so blocks are shorter."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=20)
    ).eval()
    model = sr.convert(model, "taylor:2+decay") if kind == "converted" else model
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found = analyze_checkpoint(str(tmp_path), corpus=str(texts), blocks=2, order=1)
    assert found.tokens == 40
    assert bool(found.note) == (kind == "converted")
    config = RunConfig(corpus=str(texts), tokenizer=str(tmp_path), block_size=20)
    split = TokenBlocks(load_corpus(config), "test", 20)
    ids = torch.stack([split[index]["input_ids"] for index in (0, len(split) - 1)])
    pd.testing.assert_frame_equal(found.heads, analyze(model, ids, order=1).heads)


def test_mistakes_with_a_checkpoint_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no model"):
        analyze_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="blocks must be an integer >= 1, not 0"):
        analyze_checkpoint(tmp_path, blocks=0)
