"""Which optional dependencies (extra) a missing package belongs to."""

from __future__ import annotations

from softmax_rnn._utils.errors import missing_extra

# By the name that is imported. The extra of a command brings those of "train" and "report".
EXTRAS = {
    **dict.fromkeys(("safetensors", "transformers"), "train"),
    **dict.fromkeys(("accelerate", "datasets", "filelock", "fsspec", "huggingface_hub"), "train"),
    **dict.fromkeys(("jsonargparse", "pandas", "pyarrow", "pydantic", "rich"), "train"),
    **dict.fromkeys(("tokenizers", "typing_extensions", "yaml", "zstandard"), "train"),
    **dict.fromkeys(("jinja2", "matplotlib", "plotly", "scipy"), "report"),
    "submitit": "cluster",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def install_hint(error: ModuleNotFoundError, command: str, needs: str) -> str | None:
    """What to install for a package that a command lacks; ``None`` if it is none of an extra.

    Args:
        error: what the import raised.
        command: the command, for the message.
        needs: the extra of the command, which brings ``train``.
    """
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return str(missing_extra(needs if extra == "train" else extra, command, error))
