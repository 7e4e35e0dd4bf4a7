"""Loading saved models from any source."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from softmax_rnn._utils.errors import missing_extra

HUB = "hf:"  # before the name of a repository of the Hugging Face Hub


def meta_model(source: Path | str) -> PreTrainedModel:
    """The model of :func:`load_model` on the device ``meta``: its sizes, without its weights."""
    place, options = _place(str(source))
    options.pop("dtype", None)
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers also raises the errors of its parsers
        raise ValueError(
            f"Cannot read the configuration of {source}: {type(error).__name__}: {error}"
        ) from error


def load_model(source: Path | str) -> PreTrainedModel:
    """A causal language model, without running code from its source.

    Args:
        source: a folder with safetensors, a GGUF file (its weights are unpacked to float32), or
            ``hf:owner/name``, a repository of the Hugging Face Hub.

    Raises:
        ValueError: if it cannot be loaded or lacks a weight, naming the source.
        ModuleNotFoundError: for a GGUF file, if the package ``gguf`` is missing.
    """
    name = str(source)
    place, options = _place(name)
    if "gguf_file" not in options:
        options["use_safetensors"] = True  # a pickle could run any code
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            place,  # with local files only: else a missing folder means a repository
            trust_remote_code=False,  # and no prompt for it
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers also raises the errors of its parsers
        raise ValueError(
            f"Cannot load the model in {name}: {type(error).__name__}: {error}"
        ) from error
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "does not use")):
        if found[key]:  # a missing weight would be random
            names = ", ".join(sorted(found[key])[:5])
            raise ValueError(f"The model of {name} {what} the weights {names}.")
    return model


def _place(name: str) -> tuple[str, dict[str, Any]]:
    """Where a source is, and how transformers reads it."""
    in_hub, packed = name.startswith(HUB), name.endswith(".gguf")
    if packed and find_spec("gguf") is None:
        raise missing_extra("gguf", name, ModuleNotFoundError(name="gguf"))
    if not in_hub and not Path(name).exists():
        raise ValueError(
            f"Cannot load the model in {name}: there is no such folder or file. A model of the "
            f"Hugging Face Hub is called {HUB}owner/name."
        )
    options: dict[str, Any] = {"local_files_only": not in_hub}
    if not packed:
        return name.removeprefix(HUB), options
    options |= {"gguf_file": Path(name).name, "dtype": torch.float32}
    return str(Path(name).parent), options
