"""Runs that train a pretrained model with a new attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from softmax_rnn.conversion.heads import window_off
from softmax_rnn.conversion.layer import (
    Attending,
    ConvertedLayer,
    as_source,
    converted_layers,
    substituted,
)
from softmax_rnn.conversion.objectives import (
    AttentionTransfer,
    Distillation,
    relative_errors,
)
from softmax_rnn.conversion.trainable import conversion_model
from softmax_rnn.data import load_tokenizer
from softmax_rnn.training.config import ConversionConfig, RunConfig, load_config
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.loop import Loop
from softmax_rnn.training.losses import objective
from softmax_rnn.training.opening import open_model
from softmax_rnn.training.run import load_rows, train
from sources import save_source

RUN: dict[str, Any] = {
    "attention": "lolcats:8",
    "block_size": 32,
    "batch_size": 4,
    "test_fraction": 0.2,
    "steps": 12,
    "log_every": 2,
    "evaluate_every": 6,
    "save_every": 4,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source") / "llama", tie_word_embeddings=True)


def config(source: Path, texts: Path, **fields: Any) -> ConversionConfig:
    return ConversionConfig(**{**RUN, "source": str(source), "corpus": str(texts), **fields})


def model_of(settings: ConversionConfig) -> tuple[PreTrainedModel, str]:
    return conversion_model(open_model(settings.source).model, settings)


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (rows, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def test_transfer_trains_the_new_attention_alone(source: Path, texts: Path, tmp_path: Path) -> None:
    run = train(config(source, texts, objective="transfer"), tmp_path / "run")
    before, after = AutoModelForCausalLM.from_pretrained(source), open_model(str(run.path)).model
    weights = after.state_dict()
    for name, weight in before.state_dict().items():
        assert torch.equal(weights[name], weight), name
    fresh, _ = model_of(config(source, texts, objective="transfer"))
    own = {f"{name}" for name, x in fresh.named_parameters() if x.requires_grad}
    assert own
    assert all(".softmax_rnn." in name for name in own)
    start = fresh.state_dict()
    assert all(not torch.equal(weights[name], start[name]) for name in own)
    assert run.metrics.loss.iloc[-1] < 0.9 * run.metrics.loss.iloc[0]
    assert run.evaluations.test_loss.iloc[-1] != run.evaluations.test_loss.iloc[0]  # the student's


def test_the_loss_of_a_transfer_is_that_of_each_layer_by_itself(source: Path, texts: Path) -> None:
    model, _ = model_of(config(source, texts, objective="transfer"))
    given, plain = batch(), AutoModelForCausalLM.from_pretrained(source)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for layer in plain.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
        )
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    plain(input_ids=given["input_ids"])
    positions = plain.model.rotary_emb(inputs[0], torch.arange(32)[None])
    errors = []
    for layer, hidden, expected in zip(model.model.layers, inputs, outputs, strict=True):
        found: list[torch.Tensor] = []
        hook = layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args, found=found: found.append(args[0])
        )
        layer.self_attn(hidden, position_embeddings=positions, attention_mask=None)
        hook.remove()
        difference = (found[0] - expected).unflatten(-1, (4, 8)).square().sum((1, 3))
        errors.append(difference / expected.unflatten(-1, (4, 8)).square().sum((1, 3)))
    loss = AttentionTransfer(model, 4)(124, **given)
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    loss.backward()
    assert all(x.grad is not None for x in model.parameters() if x.requires_grad)


def test_padding_does_not_count_in_a_transfer() -> None:
    found, expected = torch.randn(2, 1, 6, 3, 5)
    shown = torch.tensor([[1, 1, 1, 1, 0, 0]])
    whole = relative_errors(found, expected, shown)
    torch.testing.assert_close(whole, relative_errors(found[:, :4], expected[:, :4]))


@pytest.mark.parametrize("rank", [4, 0])
def test_distillation_mixes_cross_entropy_and_divergence(
    source: Path, texts: Path, rank: int
) -> None:
    settings = config(source, texts, lora_rank=rank, distillation=0.3)
    model, _ = model_of(settings)
    with torch.no_grad():  # else the additions are zero
        for name, x in model.named_parameters():
            if ".lora_" in name:
                x.normal_(std=0.1)
    mixed, given = Distillation(model, 0.3, whole=not rank), batch()
    if not rank:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    loss = mixed(124, **given)
    plain = AutoModelForCausalLM.from_pretrained(source)
    labels = given["labels"][:, 1:].flatten()
    wanted = plain(input_ids=given["input_ids"]).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    found = model(input_ids=given["input_ids"]).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found)).sum() / 124
    torch.testing.assert_close(loss, 0.7 * F.nll_loss(found, labels) + 0.3 * divergence)
    assert len(mixed.copies) == (not rank)
    assert {name for name, _ in mixed.named_parameters()} == {
        f"model.{name}" for name, _ in model.named_parameters()
    }


def test_dropped_windows(source: Path, texts: Path) -> None:
    settings = config(source, texts, window_dropout=1.0)
    model, _ = model_of(settings)
    trained = objective(model.train(), settings)
    layers, seen = converted_layers(model), set()
    for number in range(12):
        ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(number))
        given = {"input_ids": ids, "labels": ids}
        loss = trained(62, **given)
        dropped = [layer for layer in layers if layer.window_dropped]
        seen.add(len(dropped))
        model.zero_grad()
        loss.backward()
        # On several processes, a parameter without a gradient is an error.
        assert all(x.grad is not None for x in model.parameters() if x.requires_grad)

        def attend(what: Attending, dropped: list[ConvertedLayer] = dropped) -> torch.Tensor:
            return window_off(what) if what.layer in dropped else what.converted()

        model.eval()
        with substituted(model, attend):
            expected = Distillation(model, 0.5, whole=False)(62, **given)
        with substituted(model, Attending.converted):
            whole = Distillation(model, 0.5, whole=False)(62, **given)
        assert torch.equal(whole, Distillation(model, 0.5, whole=False)(62, **given))
        model.train()
        torch.testing.assert_close(loss, expected)
        assert bool(dropped) == (abs(float((loss - whole).detach())) > 1e-6)
        assert torch.equal(trained(62, **given), loss)
    assert seen == {0, 1, 2}
    trained.left = 0.0
    trained(62, **given)
    assert not any(layer.window_dropped for layer in layers)


def test_a_run_drops_fewer_windows_towards_its_end(
    source: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []
    forward = Distillation.forward

    def noted(self: Distillation, *args: Any, **batch: torch.Tensor) -> torch.Tensor:
        left.append(self.left)
        return forward(self, *args, **batch)

    monkeypatch.setattr(Distillation, "forward", noted)
    train(config(source, texts, steps=4, window_dropout=0.5), tmp_path / "run")
    assert left == [1.0, 0.75, 0.5, 0.25]


def test_lora_is_merged_into_what_is_saved(source: Path, texts: Path, tmp_path: Path) -> None:
    run = train(config(source, texts, lora_rank=2, steps=6), tmp_path / "run")
    model = open_model(str(run.path)).model
    plain = AutoModelForCausalLM.from_pretrained(source).state_dict()
    changed = {
        name for name, x in model.state_dict().items() if not torch.equal(x, plain.get(name, x))
    }
    linear = {
        f"{name}.weight"
        for name, x in model.model.named_modules(prefix="model")
        if isinstance(x, nn.Linear)
    }
    assert changed == linear
    for name in changed:
        assert torch.linalg.matrix_rank(model.state_dict()[name] - plain[name], rtol=1e-3) == 2
    ids = run.test_losses
    assert len(ids)


def test_a_saved_conversion_has_the_loss_of_its_run(
    source: Path, texts: Path, tmp_path: Path
) -> None:
    from softmax_rnn.analysis.evaluation import losses

    settings = config(source, texts, steps=6)
    run = train(settings, tmp_path / "run")
    _, _, rows = load_rows(settings)
    found = losses(open_model(str(run.path)).model, rows)
    torch.testing.assert_close(
        found.losses.double().mean(1), torch.from_numpy(run.test_losses), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    "fields", [{"objective": "transfer"}, {}, {"lora_rank": 0}, {"window_dropout": 1.0}]
)
def test_a_killed_run_goes_on_to_the_same_weights(
    source: Path, texts: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    settings = config(source, texts, **fields)
    calm = train(settings, tmp_path / "calm")
    run = RunFolder(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_until_killed(settings, run.path)
    train(settings, run.path, resume=True)
    assert_same(calm, run)


def train_until_killed(settings: ConversionConfig, path: Path) -> None:
    """A session that ends without a warning, after a few steps and a checkpoint."""
    original, steps = Loop.gradients, 0

    def gradients(loop: Loop) -> float:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise KeyboardInterrupt
        return original(loop)

    Loop.gradients = gradients  # type: ignore[method-assign]
    try:
        train(settings, path, resume=True)
    finally:
        Loop.gradients = original  # type: ignore[method-assign]


def assert_same(a: RunFolder, b: RunFolder) -> None:
    assert (a.test_losses == b.test_losses).all()
    there, here = (open_model(str(run.path)).model.state_dict() for run in (a, b))
    for name, weight in there.items():
        assert torch.equal(weight, here[name]), name


def test_the_losses_of_shares_add_up(source: Path, texts: Path) -> None:
    given, shares = batch(), (slice(0, 1), slice(1, 4))
    for fields in ({"objective": "transfer"}, {}):
        settings = config(source, texts, **fields)
        loss = objective(model_of(settings)[0], settings)
        parts = [loss(124, **{name: x[rows] for name, x in given.items()}) for rows in shares]
        torch.testing.assert_close(sum(parts), loss(124, **given))


@pytest.mark.parametrize("fields", [{"objective": "transfer"}, {}])
def test_a_run_in_bfloat16_is_near_one_in_float32(
    source: Path, texts: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    settings = config(source, texts, steps=6, **fields)
    runs = [
        train(replace(settings, precision=precision), tmp_path / precision)
        for precision in ("fp32", "bf16")
    ]
    losses = [run.metrics.loss.to_numpy() for run in runs]
    assert not np.array_equal(*losses)
    np.testing.assert_allclose(*losses, rtol=0.05)


@pytest.mark.parametrize("fields", [{"objective": "transfer"}, {}, {"window_dropout": 1.0}])
def test_recomputed_activations_change_nothing(
    source: Path, texts: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    settings = config(source, texts, steps=4, **fields)
    plain = train(settings, tmp_path / "plain")
    found = train(replace(settings, gradient_checkpointing=True), tmp_path / "recomputed")
    np.testing.assert_allclose(found.metrics.loss, plain.metrics.loss, rtol=1e-5)


def test_settings_are_saved_and_read(source: Path, texts: Path, tmp_path: Path) -> None:
    settings = config(source, texts, layers=[1], lora_rank=3)
    settings.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == settings
    RunConfig().save(tmp_path / "new.yaml")
    assert load_config(tmp_path / "new.yaml") == RunConfig()


def test_only_the_chosen_layers_are_converted(source: Path, texts: Path) -> None:
    model, _ = model_of(config(source, texts, layers=[1], objective="transfer"))
    assert [layer.record.index for layer in converted_layers(model)] == [1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": ""}, "source must name"),
        ({"fsdp": True}, "fsdp=true is for new models"),
        ({"distillation": 1.5}, "distillation"),
        ({"objective": "transfr"}, "objective"),
        ({"layers": [-1]}, "layers"),
        ({"block_size": 8}, "sees all 8 tokens of a block"),
        ({"packing": "documents"}, "needs packing='blocks'"),
        ({"window_dropout": 1.5}, "window_dropout"),
        ({"window_dropout": 0.5, "attention": "taylor:2"}, "needs an attention with a window and"),
        ({"window_dropout": 0.5, "attention": "window:8"}, "needs an attention with a window and"),
    ],
)
def test_invalid_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConversionConfig(**{**RUN, "source": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": [2]}, "layers of this model are"),
        ({"block_size": 256}, "longer than the 128 tokens"),
        ({"attention": "softmax", "objective": "transfer"}, "no parameters of its own"),
        ({"attention": "window:8", "objective": "transfer"}, "no parameters of its own"),
    ],
)
def test_what_cannot_be_converted(
    source: Path, texts: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(config(source, texts, **fields))


def test_a_converted_source_keeps_its_attention(source: Path, texts: Path, tmp_path: Path) -> None:
    first = train(config(source, texts, objective="transfer", steps=2), tmp_path / "first")
    model, _ = model_of(config(first.path, texts))
    assert len(converted_layers(model)) == 2
    for fields in ({"attention": "lolcats:4"}, {"layers": [0]}):
        with pytest.raises(ValueError, match="converted already, with another attention"):
            model_of(config(first.path, texts, **fields))


def test_a_run_does_not_resume_from_another_source(texts: Path, tmp_path: Path) -> None:
    folder = save_source(tmp_path / "llama")
    settings = config(folder, texts, objective="transfer")
    with pytest.raises(KeyboardInterrupt):
        train_until_killed(settings, tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="its weights have changed"):
        train(settings, tmp_path / "run", resume=True)


def test_an_unfinished_conversion_is_no_model(source: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_until_killed(config(source, texts), tmp_path / "run")
    with pytest.raises(ValueError, match="finish the run to use it"):
        open_model(str(tmp_path / "run"))


def test_dropout_is_switched_off(texts: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 257}
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(**fields)).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    settings = config(folder, texts, steps=4, save_every=2, evaluate_every=2)
    run = train(settings, tmp_path / "run")
    model = open_model(str(run.path)).model.train()
    ids = batch()["input_ids"]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert any(p > 0 for p in (GPT2Config().attn_pdrop, GPT2Config().resid_pdrop))


def test_the_source_inside_a_converted_model(source: Path, texts: Path) -> None:
    model, _ = model_of(config(source, texts, objective="transfer"))
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source)
    ids = batch()["input_ids"]
    with substituted(model, as_source):
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-3)
    with substituted(model, as_source), pytest.raises(ValueError, match="only without a cache"):
        model(ids, past_key_values=model.new_cache())
