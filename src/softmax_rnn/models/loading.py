"""Loading saved models from any source."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from softmax_rnn._utils.errors import missing_extra

HUB = "hf:"  # before the name of a repository of the Hugging Face Hub


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
    options: dict[str, Any] = {"local_files_only": not name.startswith(HUB)}
    place = name.removeprefix(HUB)
    if name.endswith(".gguf"):
        if find_spec("gguf") is None:
            raise missing_extra("gguf", name, ModuleNotFoundError(name="gguf"))
        place = str(Path(name).parent)
        options |= {"gguf_file": Path(name).name, "dtype": torch.float32}
    else:
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
