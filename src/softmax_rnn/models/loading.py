"""Loading saved models from any source."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel


def load_model(folder: Path) -> PreTrainedModel:
    """The causal language model in a folder: from safetensors alone, and no code of its own.

    Raises:
        ValueError: if it cannot be loaded or lacks a weight, naming the folder.
    """
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,  # a missing folder is not a repository of that name
            use_safetensors=True,  # a pickle could run anything
            trust_remote_code=False,  # without a prompt
            output_loading_info=True,
        )
    except Exception as error:  # transformers passes on those of its parsers
        raise ValueError(
            f"Cannot load the model in {folder}: {type(error).__name__}: {error}"
        ) from error
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no use for")):
        if found[key]:  # a weight that is missing would be random
            names = ", ".join(sorted(found[key])[:5])
            raise ValueError(f"The model of {folder}/config.json {what} the weights {names}.")
    return model
