"""Open any causal language model together with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softmax_rnn.data import load_tokenizer
from softmax_rnn.models.loading import HUB, load_model, meta_model
from softmax_rnn.training.checkpoint import load_trained, model_folder
from softmax_rnn.training.folder import RunFolder


class OpenedModel(NamedTuple):
    """A model from any source.

    Attributes:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        run: the run that trained it; ``None`` for a model from elsewhere.
        tokenizer_name: the name by which a corpus is prepared with this tokenizer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    run: RunFolder | None
    tokenizer_name: str


def open_model(source: str, *, end_of_text: str | None = None) -> OpenedModel:
    """A model and its tokenizer.

    Args:
        source: the folder of a run (its newest intact checkpoint is used), of one of its
            checkpoints or of a saved model; a GGUF file; or ``hf:owner/name``, a repository of the
            Hugging Face Hub.
        end_of_text: token of the tokenizer that ends each document; by default its own.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: if the model or the tokenizer cannot be loaded.
        ModuleNotFoundError: for a GGUF file, if the package ``gguf`` is missing.
    """
    name, run = tokenizer_name(source), None
    if _elsewhere(source):
        model = load_model(source)
    else:
        folder = Path(name)
        places = map(RunFolder, (Path(source), folder.parent))
        run = next((run for run in places if run.exists), None)
        model = load_trained(folder)
    tokenizer = load_tokenizer(
        name, end_of_text=end_of_text, local=not source.startswith(HUB), ends=False
    )
    return OpenedModel(model.eval(), tokenizer, run, name)


def check_source(source: str) -> None:
    """Raise what :func:`open_model` would, as far as the configuration shows it."""
    meta_model(source if _elsewhere(source) else model_folder(Path(source)))


def tokenizer_name(source: str) -> str:
    """The name of the tokenizer of a model that :func:`open_model` opens."""
    return source.removeprefix(HUB) if _elsewhere(source) else str(model_folder(Path(source)))


def _elsewhere(source: str) -> bool:
    """Whether a source is not a folder."""
    return source.startswith(HUB) or source.endswith(".gguf")
