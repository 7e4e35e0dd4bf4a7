"""The card of a converted model: the README.md of its folder, as the Hugging Face Hub shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from softmax_rnn.models.loading import HUB
from softmax_rnn.training.config import ConversionConfig

NAME = "README.md"


def card(config: ConversionConfig, runs: Mapping[str, Mapping[str, Any]], results: str = "") -> str:
    """The text of a card.

    Args:
        config: the settings of the conversion, with the pretrained model as ``source``.
        runs: ``steps``, ``tokens`` and ``seconds`` of the stages that trained it.
        results: what was measured, in Markdown.

    Returns:
        Markdown with the Hub's metadata. The licence is left to the user.
    """
    on_hub = config.source.startswith(HUB)
    # No folders of the machine on which it was made.
    name = config.source.removeprefix(HUB) if on_hub else Path(config.source).name
    corpus = Path(config.corpus).name if Path(config.corpus).exists() else config.corpus
    attention = config.attention if isinstance(config.attention, str) else "an attention of its own"
    about = ModelCardData(
        base_model=name if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["softmax-rnn", "linear-attention"],
    )
    trained = [
        f"- {stage}: {run['steps']:,} steps, {run['tokens']:,} tokens, {run['seconds'] / 60:.0f} "
        "minutes"
        for stage, run in runs.items()
    ]
    which = "all layers" if config.layers is None else f"the layers {_numbers(config.layers)}"
    lines = [
        f"# {name} with {attention}",
        f"`{name}`, in which softmax attention was replaced by `{attention}` in {which}, by "
        "`softmax-rnn convert`.",
        "## Use",
        "```python\n"
        "import softmax_rnn.models  # without it, loading is an error\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("...")  # this folder, or its name on the Hub'
        '\ntokenizer = AutoTokenizer.from_pretrained("...")\n'
        "```",
        "## Training",
        f"On `{corpus}`, in blocks of {config.block_size} tokens.",
        "\n".join(trained),
        *(["## Results", results] if results else []),
        "## Licence",
        "Not stated yet: add `license:` to the metadata at the top of this file. Those of the "
        "source and of the text may bind it.",
    ]
    return str(ModelCard(f"---\n{about.to_yaml()}\n---\n" + "\n\n".join(lines) + "\n"))


def _numbers(layers: list[int]) -> str:
    """``0, 2, 4-7``."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(f"{x[0]}-{x[-1]}" if len(x) > 1 else str(x[0]) for x in parts)
