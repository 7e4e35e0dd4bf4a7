"""Loading saved models from any source."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel


def load_model(folder: Path) -> PreTrainedModel:
    """The causal language model in a folder, from safetensors only and without running its code.

    Raises:
        ValueError: if it cannot be loaded or lacks a weight, naming the folder.
    """
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,  # else a missing folder means a repository of that name
            use_safetensors=True,  # a pickle could run any code
            trust_remote_code=False,  # and no prompt for it
            output_loading_info=True,
        )
    except Exception as error:  # transformers also raises the errors of its parsers
        raise ValueError(
            f"Cannot load the model in {folder}: {type(error).__name__}: {error}"
        ) from error
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "does not use")):
        if found[key]:  # a missing weight would be random
            names = ", ".join(sorted(found[key])[:5])
            raise ValueError(f"The model of {folder}/config.json {what} the weights {names}.")
    return model
