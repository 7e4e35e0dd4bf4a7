"""Converted models in the trainers of others: transformers' and peft's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

import softmax_rnn as sr
from converted_families import IDS, converted, source
from softmax_rnn.conversion.layer import Attending, substituted

NEW = "softmax_rnn."  # in the names of the new attention's parameters


def adapted(model: Any, **options: Any) -> Any:
    settings = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, settings)


def trained(model: nn.Module, folder: Path) -> None:
    """Train a few steps with transformers' Trainer."""
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    settings = TrainingArguments(
        str(folder), max_steps=3, learning_rate=1e-2, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model, settings, train_dataset=rows).train()  # type: ignore[arg-type]  # a list will do


def new_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters() if NEW in name}


def test_the_trainer_of_transformers_trains_the_new_attention(tmp_path: Path) -> None:
    model = converted("Llama", "window_state:4")
    before = new_parameters(model)
    trained(model, tmp_path)
    after = new_parameters(model)
    assert before
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_peft_trains_and_saves_the_new_attention(tmp_path: Path) -> None:
    model = converted("Llama", "window_state:4")
    expected = model(IDS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = adapted(model, modules_to_save=sr.modules_to_save(model))
        assert torch.equal(model.eval()(IDS).logits, expected)
        trained(model, tmp_path)
    after = {name: x for name, x in new_parameters(model).items() if ".modules_to_save." in name}
    before = new_parameters(converted("Llama", "window_state:4"))
    assert len(after) == len(before)
    for name, x in after.items():
        plain = name.replace("modules_to_save.default.", "").removeprefix("base_model.model.")
        assert not torch.equal(x, before[plain]), name
    with torch.no_grad():
        logits = model.eval()(IDS).logits
    assert not torch.allclose(logits, expected, atol=1e-3)

    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        converted("Llama", "window_state:4"), str(tmp_path / "adapter")
    )
    assert torch.allclose(loaded.eval()(IDS).logits, logits, atol=1e-5)

    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(whole(IDS).logits, logits, atol=1e-4)
    assert torch.equal(whole.generate(IDS, max_new_tokens=8), model.generate(IDS, max_new_tokens=8))


def test_a_warning_tells_of_frozen_new_parameters() -> None:
    model = adapted(converted("Llama", "window_state:4"))
    with pytest.warns(UserWarning, match=r"parameters of this model's new attention are frozen"):
        model.train()


@pytest.mark.parametrize("train", ["all", "new", "nothing"])
def test_no_warning_where_nothing_new_is_left_behind(train: str) -> None:
    model = converted("Llama", "window_state:4")
    for name, x in model.named_parameters():
        x.requires_grad = train == "all" or (train == "new" and NEW in name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
        model.eval()


def test_names_for_peft() -> None:
    assert sr.modules_to_save(converted("Llama", "taylor:2")) == []
    assert sr.modules_to_save(converted("Llama", "gate")) != []
    with pytest.raises(ValueError, match="this LlamaForCausalLM is not converted"):
        sr.modules_to_save(source("Llama"))


@pytest.mark.parametrize("flash", [False, True])
def test_packed_documents_train_as_documents_one_by_one(flash: bool, tmp_path: Path) -> None:
    documents = [
        {"input_ids": row[:length].tolist()} for row, length in zip(IDS, (12, 7), strict=True)
    ]
    for name in ("window_state:4", "lolcats:4"):
        model = converted("Llama", name).double()
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
        packed = model(**collator(documents), use_cache=False)
        packed.loss.backward()
        found = {key: x.grad for key, x in model.named_parameters()}
        model.zero_grad()
        sums = []
        for document in documents:
            ids = torch.tensor([document["input_ids"]])
            count = ids.shape[1] - 1
            sums.append(model(ids, labels=ids, use_cache=False).loss * count)
        expected = sum(sums) / (11 + 6)
        torch.testing.assert_close(packed.loss, expected)
        expected.backward()
        for key, x in model.named_parameters():
            torch.testing.assert_close(found[key], x.grad, msg=key)


def test_stages_of_a_conversion_on_packed_documents() -> None:
    """Each objective sees every document alone."""
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    model = converted("Llama", "window_state:3").double()
    packed: list[tuple[torch.Tensor, torch.Tensor]] = []
    alone: list[tuple[torch.Tensor, torch.Tensor]] = []
    for kept, batches in (
        (packed, [{"input_ids": IDS[:1], "position_ids": positions}]),
        (alone, [{"input_ids": x} for x in IDS[:1].split([7, 5], dim=1)]),
    ):

        def compare(
            what: Attending, kept: list[tuple[torch.Tensor, torch.Tensor]] = kept
        ) -> torch.Tensor:
            expected = what.source()
            kept.append((what.converted(), expected))
            return expected

        with substituted(model, compare), torch.no_grad():
            for batch in batches:
                model(**batch, use_cache=False)
    layers = len(packed)
    assert len(alone) == 2 * layers
    for place, pair in enumerate(packed):
        for which, found in enumerate(pair):
            parts = [alone[layers * half + place][which] for half in range(2)]
            torch.testing.assert_close(found, torch.cat(parts, dim=1), rtol=1e-6, atol=1e-6)
