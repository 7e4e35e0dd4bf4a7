"""Which optional dependency group (extra) a missing package belongs to."""

from __future__ import annotations

from softmax_rnn._utils.errors import missing_extra

# Import name -> extra. Every command's own extra includes the packages of "train".
EXTRAS = {
    **dict.fromkeys(("safetensors", "transformers"), "train"),
    **dict.fromkeys(("accelerate", "datasets", "filelock", "fsspec", "huggingface_hub"), "train"),
    **dict.fromkeys(
        ("jsonargparse", "packaging", "pandas", "pyarrow", "pydantic", "rich"), "train"
    ),
    **dict.fromkeys(("tokenizers", "typing_extensions", "yaml", "zstandard"), "train"),
    **dict.fromkeys(("jinja2", "matplotlib", "plotly", "scipy"), "report"),
    "sklearn": "digits",
    "submitit": "cluster",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "gguf": "gguf",
    "peft": "convert",
    "lm_eval": "evaluate",
}


# The commands that need "train" alone, known before the parser can be imported.
OF_TRAIN = ("train", "prepare", "generate", "variants", "evaluate", "doctor")


def install_hint(error: ModuleNotFoundError, command: str, needs: str) -> str | None:
    """What to install for a missing package; ``None`` if no extra contains it.

    Args:
        error: the error of the import.
        command: the command, for the message.
        needs: the command's own extra, which includes ``train``.
    """
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return str(missing_extra(needs if extra == "train" else extra, command, error))
