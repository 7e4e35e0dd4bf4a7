"""Nothing that comes from outside is run as code."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import softmax_rnn
from softmax_rnn.analysis.heads.analyze import analyze_checkpoint
from softmax_rnn.cli.generate import generate
from softmax_rnn.data import load_tokenizer
from softmax_rnn.data.tokenizer import byte_tokenizer
from softmax_rnn.models import SoftmaxRNNConfig, SoftmaxRNNForCausalLM
from softmax_rnn.models.loading import load_model

SOURCE = Path(softmax_rnn.__file__).parent
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {
    *("eval", "exec", "os.system", "os.popen", "pd.read_pickle", "pickle.load", "pickle.loads"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader"),
    *("yaml.FullLoader", "yaml.UnsafeLoader", "torch.hub.load"),
}
ARGUMENTS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}
ARGUMENTS |= {("shell", True)}


def _unsafe(code: str) -> Iterator[str]:
    """What in a module could run code that comes from outside."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in modules if name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in CALLS:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            given = {word.arg: word.value for word in node.keywords}
            for name, value in given.items():
                if isinstance(value, ast.Constant) and (name, value.value) in ARGUMENTS:
                    yield ast.unparse(node)
            if ast.unparse(node.func) == "torch.load" and "weights_only" not in given:
                yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_runs_what_it_reads(path: Path) -> None:
    assert list(_unsafe(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import load", "yaml.load(text)", "yaml.unsafe_load(text)"),
        *("class L(yaml.Loader): ...", "torch.load(path)", "torch.load(path, weights_only=False)"),
        *("np.load(path, allow_pickle=True)", "eval(text)", "subprocess.run(line, shell=True)"),
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_what_would_be_found(code: str) -> None:
    assert list(_unsafe(code))
    assert not list(_unsafe("yaml.safe_load(t); torch.load(p, weights_only=True); np.load(p)"))


class Trap:
    """An object whose pickle leaves a folder behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder as anybody could have made it."""
    config = SoftmaxRNNConfig(
        attention="norm",
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        eos_token_id=256,
    )
    SoftmaxRNNForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _pickled(model: Path, trap: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap(trap)}, model / "pytorch_model.bin")


def _with_code(model: Path, trap: Path) -> None:
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(trap)!r})\nEvil = Config = object\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Evil"}
    _change(model / "config.json", model_type="evil", auto_map=names)
    names = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    _change(model / "tokenizer_config.json", tokenizer_class="Evil", auto_map=names)


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "load_model": lambda model, texts: load_model(model),
    "load_tokenizer": lambda model, texts: load_tokenizer(str(model)),
    "analyze": lambda model, texts: analyze_checkpoint(model, corpus=str(texts)),
    "generate": lambda model, texts: generate(model, "a b", max_new_tokens=2),
}


@pytest.mark.parametrize("damage", [_pickled, _with_code])
@pytest.mark.parametrize("reader", READERS)
def test_a_models_folder_runs_nothing(
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reader: str,
    damage: Callable[[Path, Path], None],
) -> None:
    READERS[reader](model, texts)  # as it is, it works
    damage(model, tmp_path / "trap")
    monkeypatch.setattr(sys, "stdin", StringIO("y\n" * 9))  # yes to every question
    if (reader, damage) == ("load_tokenizer", _pickled):
        READERS[reader](model, texts)
    else:
        with pytest.raises(ValueError, match=str(model)):
            READERS[reader](model, texts)
    assert not (tmp_path / "trap").exists()


def test_weights_are_read_from_safetensors_alone(model: Path) -> None:
    torch.save(load_model(model).state_dict(), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{model}.*no file named model.safetensors"):
        load_model(model)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", b"", "config"),
        ("config.json", b"[" * 100_000, "recursion"),
        ("config.json", b'{"model_type": "softmax_rnn", "hidden_size": "a"}', "hidden_size"),
        ("config.json", b'{"model_type": "softmax_rnn", "attention": "nrm"}', "'norm'"),
        ("model.safetensors", b"", "Safetensor"),
        ("model.safetensors", b"\xff" * 100, "Safetensor"),
        ("model.safetensors", None, "model.safetensors"),
    ],
)
def test_a_damaged_model_is_named(model: Path, name: str, content: Any, told: str) -> None:
    (model / name).unlink()
    if content is not None:
        (model / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{model}.*{told}"):
        load_model(model)


@pytest.mark.parametrize(("layers", "told"), [(2, "lacks the weights"), (0, "does not use")])
def test_a_model_without_its_weights_is_refused(model: Path, layers: int, told: str) -> None:
    _change(model / "config.json", num_hidden_layers=layers)
    with pytest.raises(ValueError, match=rf"{told} .*model\.layers\.\d\.input_layernorm"):
        load_model(model)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": 5}', b"[" * 100_000])
def test_a_damaged_tokenizer_is_named(model: Path, content: bytes) -> None:
    (model / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{model}"):
        load_tokenizer(str(model))
