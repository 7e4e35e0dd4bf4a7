"""The command ``evaluate``: any model's loss on a corpus, and lm_eval's tasks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from softmax_rnn._utils.files import require_writable, write_json
from softmax_rnn.cli.command import CORPUS_FIELDS, Command, add_corpus, show, show_paths

# Settings of a run that may be replaced.
_OF_RUN = ("corpus", "block_size", *CORPUS_FIELDS)


def _options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument(
        "model",
        type=str,
        help="folder of a run, checkpoint or saved model; a .gguf file; or hf:owner/name",
    )
    parser.add_argument(
        "--corpus", type=str, help="text or task: as for train (default: the run's own)"
    )
    add_corpus(parser, {})
    parser.add_argument(
        "--block_size",
        type=int,
        help="tokens per block, and the longest context of --tasks (default: the run's, else the "
        "model's positions, for blocks at most 1024)",
    )
    parser.add_argument(
        "--blocks", type=int, help="blocks of the test split, spread evenly (default: all)"
    )
    parser.add_argument(
        "--batch_size", type=int, help="blocks per forward pass (default: the run's, else 1)"
    )
    parser.add_argument("--tasks", type=str, nargs="+", help="tasks of lm_eval, instead of a loss")
    parser.add_argument("--include_path", type=str, help="folder with tasks of your own (YAML)")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question")
    parser.add_argument("--limit", type=float, help="questions per task; below 1, their share")
    parser.add_argument("--out", type=str, help="folder to write to (default: the model's)")


def _evaluate(parsed: Namespace) -> int:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from softmax_rnn._utils.progress import ProgressBar
    from softmax_rnn.analysis.evaluation import evaluate
    from softmax_rnn.training.environment import environment
    from softmax_rnn.training.opening import open_model

    if parsed.tasks:
        from softmax_rnn.analysis import harness  # a missing package is reported before the work

    place = Path(parsed.out or parsed.model)
    folder = place if parsed.out or place.is_dir() else None
    if folder is not None:
        require_writable(folder)
    disable_progress_bar()
    opened = open_model(parsed.model, end_of_text=parsed.end_of_text)
    opened.model.to("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {"model": parsed.model}
    if parsed.corpus or not parsed.tasks:
        with ProgressBar(f"Evaluating {parsed.model}") as bar:
            evaluation = evaluate(
                opened,
                blocks=parsed.blocks,
                batch_size=parsed.batch_size,
                progress=lambda done, total: bar.update(done, total=total),
                **{name: parsed[name] for name in _OF_RUN},
            )
        show(evaluation.table())
        results["corpus"] = evaluation.summary()
    if parsed.tasks:
        rows = harness.run_tasks(
            opened.model,
            opened.tokenizer,
            parsed.tasks,
            include_path=None if parsed.include_path is None else Path(parsed.include_path),
            num_fewshot=parsed.num_fewshot,
            limit=parsed.limit,
            batch_size=parsed.batch_size or 1,
            max_length=parsed.block_size,
        )
        show(harness.table(rows))
        results["tasks"] = rows
    if folder is None:
        print("Nothing was written: name a folder with --out.")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    numbered = (f"evaluation-{number}.json" for number in itertools.count(2))
    names = itertools.chain(["evaluation.json"], numbered)
    path = next(folder / name for name in names if not (folder / name).exists())
    write_json(path, {**results, "environment": environment()})
    show_paths([path])
    return 0


COMMANDS = {
    "evaluate": Command(
        "measure any model's loss on a corpus, or run lm_eval's tasks",
        _options,
        _evaluate,
        about="Measure the loss of any causal language model on the test split of a corpus (loss, "
        "perplexity, bits per byte, accuracy, loss by position), or run tasks of EleutherAI's "
        "lm_eval. Writes evaluation.json, or beside earlier ones evaluation-2.json and so on.",
    )
}
