"""Converted models that are saved, copied and loaded."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
)

import softmax_rnn as sr
from converted_families import (
    FAMILIES,
    IDS,
    converted,
    source,
)


def test_it_stays_converted(tmp_path: Path) -> None:
    """No way to load the model gives the family's own softmax without an error."""
    model = converted("Llama", "taylor:2")  # without parameters of its own
    model.save_pretrained(tmp_path / "model")
    model.model.save_pretrained(tmp_path / "base")
    for folder in ("model", "base"):
        base = AutoModel.from_pretrained(tmp_path / folder).eval()
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").softmax_rnn == model.config.softmax_rnn
    fresh = AutoModelForCausalLM.from_config(again.config, attn_implementation="eager")
    assert fresh(IDS).logits.shape == (2, 12, 61)
    for kind in (LlamaForCausalLM, transformers.LlamaModel):
        for options in ({}, {"attn_implementation": "sdpa"}):
            with pytest.raises(ValueError, match=r"import softmax_rnn\.models and use an Auto"):
                kind.from_pretrained(tmp_path / "model", **options)
    with pytest.raises(ValueError, match="This LlamaAttention was not converted"):
        LlamaForCausalLM(model.config)(IDS)


@pytest.mark.slow
def test_the_first_words_say_what_to_import(tmp_path: Path) -> None:
    """In a program without this package: of the error, or of the warning before it."""
    converted("Llama", "taylor:2").save_pretrained(tmp_path)
    code = f"""
import sys, transformers
for kind in ("AutoModelForCausalLM", "AutoModel", "AutoConfig", "LlamaForCausalLM", "LlamaConfig"):
    try:
        getattr(transformers, kind).from_pretrained({str(tmp_path)!r})
    except Exception as error:
        print("softmax_rnn" in sys.modules, kind, error, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [line for line in done.stderr.splitlines() if "softmax_rnn" in line]
    unknown = "The checkpoint you are trying to load has model type `import softmax_rnn.models "
    for line, kind in zip(told, ("AutoModelForCausalLM", "AutoModel", "AutoConfig"), strict=False):
        assert line.startswith(f"False {kind} {unknown}")
    other = "You are using a model of type `import softmax_rnn.models to load this converted model`"
    number = "invalid literal for int() with base 10: 'import softmax_rnn.models and use an Auto"
    for place, kind in ((3, "LlamaForCausalLM"), (5, "LlamaConfig")):
        assert other in told[place]
        assert told[place + 1].startswith(f"False {kind} {number}")


def test_a_model_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    """Its file has another model type."""
    model = converted("Llama", "norm")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    assert fields["model_type"] == "import softmax_rnn.models to load this converted model"
    fields["model_type"] = "softmax_rnn_converted"
    path.write_text(json.dumps(fields))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.model_type == model.config.model_type == "softmax_rnn_converted"
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_configurations_that_no_table_has_with_their_class(tmp_path: Path) -> None:
    """Two families may share a class, and a class may take a part of a configuration."""
    parts = transformers.CONFIG_MAPPING["emu3"](text_config=FAMILIES["Llama"][1]).text_config
    for name, kind, config in (
        (
            "shared",
            LlamaForCausalLM,
            transformers.CONFIG_MAPPING["internlm3"](**FAMILIES["Llama"][1]),
        ),
        ("part", transformers.Emu3ForCausalLM, parts),
    ):
        model = sr.convert(kind(config).eval(), "taylor:2")
        model.save_pretrained(tmp_path / name)
        expected = model(IDS).logits
        for other in (
            AutoModelForCausalLM.from_pretrained(tmp_path / name),
            pickle.loads(pickle.dumps(model)),
        ):
            assert type(other) is type(model)
            assert torch.equal(other(IDS).logits, expected)


@pytest.mark.parametrize(
    "edit",
    [
        lambda layers: layers[1].update(index=0),
        lambda layers: layers[1].update(index=99),
    ],
)
def test_a_configuration_has_every_layer_once(tmp_path: Path, edit: Any) -> None:
    converted("Llama", "taylor:2").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    edit(fields["softmax_rnn"]["layers"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="must have different indices below 2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_labels_survive(tmp_path: Path) -> None:
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    model = source("Llama", "LlamaForSequenceClassification", id2label=labels)
    sr.convert(model, "norm").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == model.config.id2label == labels
    assert loaded.num_labels == 3
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_copies_and_pickles() -> None:
    model = converted("Llama", "taylor:2+decay")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module": "layers.9.self_attn"}, "'layers.9.self_attn' is no module of LlamaModel"),
        ({"num_heads": 0}, "num_heads of a converted layer cannot be 0"),
        ({"scaling": "1"}, "scaling of a converted layer cannot be '1'"),
        ({"causal": 1}, "causal of a converted layer cannot be 1"),
        ({"hiden_size": 3}, "Did you mean 'hidden_size'"),
        ({"attention": {"nrm": "l2"}}, "Did you mean 'norm'"),
    ],
)
def test_damaged_configurations_are_named(change: dict, message: str, tmp_path: Path) -> None:
    converted("Llama", "norm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["softmax_rnn"]["layers"][0] |= change
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("source_type", [None, 3, "no_such_type", "softmax_rnn_converted"])
def test_an_unknown_family_is_named(source_type: object, tmp_path: Path) -> None:
    fields = {"model_type": "softmax_rnn_converted", "softmax_rnn": {"source": source_type}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"softmax_rnn\.source of a converted model must be"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_model_from_a_gguf_file_can_be_saved(tmp_path: Path) -> None:
    """transformers reads plain weights, and still takes the model for a quantised one."""
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    quantization = SimpleNamespace(quant_method="gguf")
    model.hf_quantizer = SimpleNamespace(quantization_config=quantization)
    model.is_quantized, model.quantization_method = True, "gguf"
    model.config.quantization_config = {"quant_method": "gguf"}
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)
    model = sr.convert(model, "norm")
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
