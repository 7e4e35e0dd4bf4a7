"""The command that converts a pretrained model: convert."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from softmax_rnn._utils.plain_yaml import parse_fields
from softmax_rnn.cli.command import (
    Command,
    add_dry_run,
    add_stop_after,
    show,
    show_paths,
    stop_after,
)
from softmax_rnn.training.config import STAGES
from softmax_rnn.training.stopping import StopRequest, time_left


def _options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument(
        "source",
        type=str,
        help="the model: a folder, a GGUF file, or hf:owner/name of the Hugging Face Hub",
    )
    parser.add_argument(
        "--attention",
        type=str,
        default="window_state:64",
        help="a variant's name, or a YAML file with fields of AttentionSpec, as for compare",
    )
    parser.add_argument(
        "--layers",
        type=str,
        help="layers to convert, such as 0,2,4-7 (default: all); or auto:N, which keeps softmax "
        "in the N layers whose conversion changes the predictions most",
    )
    parser.add_argument(
        "--corpus", type=str, default="docstrings", help="text to train on, as for train"
    )
    parser.add_argument("--out", type=str, default="runs/convert", help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="seed of new values and of the text")
    parser.add_argument(
        "--stages",
        type=str,
        nargs="+",
        default=list(STAGES),
        help=f"some of {', '.join(STAGES)} (default: all)",
    )
    for name, what in (
        ("with", "both runs"),
        ("transfer", "the run that trains the new attention alone"),
        ("finetune", "the run that trains for the next token"),
    ):
        parser.add_argument(
            f"--{name}",
            dest=f"{name}_fields",
            nargs="+",
            default=[],
            metavar="KEY=VALUE",
            help=f"settings of {what}, such as steps=400 or learning_rate=1e-3",
        )
    add_stop_after(parser)
    add_dry_run(parser, "stage")


def _convert(parsed: Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    from softmax_rnn.conversion.plan import conversion_table
    from softmax_rnn.conversion.stages import Conversion, timed
    from softmax_rnn.experiments.costs import chosen_gpu

    disable_progress_bar()  # it would cover our own
    layers, keep = parse_layers(parsed.layers)
    conversion = Conversion.of(
        parsed.source,
        Path(parsed.out),
        parsed.attention,
        parsed.corpus,
        fields={"layers": layers, "seed": parsed.seed, **parse_fields(parsed.with_fields)},
        transfer=parse_fields(parsed.transfer_fields),
        finetune=parse_fields(parsed.finetune_fields),
        keep=keep,
    )
    if parsed.dry_run:
        show(conversion_table(conversion, chosen_gpu(parsed.gpu)))
        return 0
    left = time_left(stop_after(parsed))
    conversion.execute(parsed.stages, left)
    if "report" in parsed.stages and os.environ.get("RANK", "0") == "0":
        from softmax_rnn.conversion.report import report

        with timed("report"), StopRequest(left()):
            models, out = conversion.models, conversion.out
            settings = dataclasses.replace(conversion.finetune, layers=conversion.layers)
            table, paths = report(models, settings, out, conversion.source_hash)
        show(table)
        show_paths(paths)
    return 0


def parse_layers(text: str | None) -> tuple[list[int] | None, int]:
    """The layers of a text such as ``0,2,4-7``, and N of ``auto:N``; ``None`` for all layers.

    Raises:
        ValueError: for any other text.
    """
    if text is None:
        return None, 0
    name, _, count = text.partition(":")
    if name == "auto" and count.isdecimal() and int(count):
        return None, int(count)
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(
                f"--layers takes numbers and ranges, such as 0,2,4-7, or auto:N, not {text!r}."
            )
        layers += range(int(first), int(last or first) + 1)
    if len(set(layers)) < len(layers):
        raise ValueError(f"--layers {text} names a layer twice.")
    return sorted(layers), 0


COMMANDS = {
    "convert": Command(
        "replace the attention of a pretrained model",
        _options,
        _convert,
        about="Convert a pretrained model in stages: fit (initial values of the new attention), "
        "transfer (train it to give softmax's outputs), choose (with --layers auto:N: which layers "
        "keep softmax), finetune (train LoRA's additions, or with --finetune lora_rank=0 all "
        "weights, to predict tokens as the source does), controls (train the source and the "
        "window alone on the same tokens) and report. OUT/model has the result. Rerun it to "
        "resume.",
        extra="convert",
    ),
}
