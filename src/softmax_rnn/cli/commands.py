"""The commands: each its options, and what it calls and prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console, RenderableType
from rich.measure import Measurement
from transformers.utils import logging as transformers_logging

from softmax_rnn._utils.files import require_writable, write_json
from softmax_rnn._utils.plain_yaml import parse_fields
from softmax_rnn.analysis import analyze_checkpoint, draw, write
from softmax_rnn.cli.generate import CACHES, generate
from softmax_rnn.experiments import compare_configs, run_all
from softmax_rnn.experiments.claims import judge, rich_verdicts, verdict_table
from softmax_rnn.experiments.compare import RunsFailedError
from softmax_rnn.experiments.costs import GPUS
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.reproduce import finished_runs, plan_table, reproduce, rich_plan
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.variants import variants
from softmax_rnn.report import find_runs, report
from softmax_rnn.report.table import rich_table
from softmax_rnn.training import PRESETS, RunConfig, train
from softmax_rnn.training.run import load_corpus
from softmax_rnn.training.stopping import StopRequest, seconds

DEMO = ("softmax", "norm", "gate", "linear_elu", "linear_relu", "linear_cosine")
console = Console()


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        help: one line for the list of commands.
        options: adds its options to a parser, given the defaults of a run.
        run: does it; returns the exit code.
        about: its description; ``help`` unless given.
        epilog: what stands below its options.
    """

    help: str
    options: Callable[[ArgumentParser, dict[str, Any]], None]
    run: Callable[[Namespace], int]
    about: str = ""
    epilog: str = ""


def _add_run_options(parser: ArgumentParser, defaults: dict[str, Any], skip: set[str]) -> None:
    parser.add_argument("--config", action="config", help="YAML file with options below")
    parser.add_argument("--preset", type=str, default="demo", help=f"one of {', '.join(PRESETS)}")
    parser.add_class_arguments(RunConfig, skip=skip)
    parser.set_defaults({key: value for key, value in defaults.items() if key not in skip})


def _run_config(parsed: Namespace) -> RunConfig:
    given = vars(parsed)
    return RunConfig.from_dict({key: given[key] for key in RunConfig().to_dict() if key in given})


def _compare_options(parser: ArgumentParser, defaults: dict[str, Any]) -> None:
    parser.add_argument("variants", nargs="*", default=list(DEMO), help="variants to train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each")
    parser.add_argument("--out", type=str, default="runs/compare", help="folder of the runs")
    _add_parallel(parser)
    _add_stop_after(parser)
    _add_run_options(parser, defaults, skip={"attention", "seed"})


def _add_parallel(parser: ArgumentParser) -> None:
    parser.add_argument("--parallel", type=int, help="runs at a time (default: one a GPU or core)")


def _add_stop_after(parser: ArgumentParser) -> None:
    parser.add_argument("--stop_after", type=str, help="save and stop after, say, 1h50m or 90s")


def _stop_after(parsed: Namespace) -> float | None:
    return None if parsed.stop_after is None else seconds(parsed.stop_after)


def _compare(parsed: Namespace) -> int:
    root = Path(parsed.out)
    runs = compare_configs(parsed.variants, parsed.seeds, _run_config(parsed), root)
    failure = None
    try:
        run_all(
            runs, root, parallel=parsed.parallel, stop_after=_stop_after(parsed), console=console
        )
    except RunsFailedError as error:
        failure = error
    finished = [run.folder for run in runs if run.folder.finished]
    if finished:
        _report_on(finished, root)
    if failure is not None:
        raise failure
    return 0


def _train_options(parser: ArgumentParser, defaults: dict[str, Any]) -> None:
    parser.add_argument("--out", type=str, default="runs/train", help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished run")
    _add_stop_after(parser)
    _add_run_options(parser, defaults, skip=set())


def _train(parsed: Namespace) -> int:
    folder = train(
        _run_config(parsed),
        Path(parsed.out),
        resume=parsed.resume,
        stop_after=_stop_after(parsed),
    )
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of a run speaks for all
    summary = folder.summary
    console.print(
        f"{folder.path}: {summary['steps']} steps, train loss {summary['train_loss']:.4f}, "
        f"test loss {summary['test_loss']:.4f}",
        soft_wrap=True,
        markup=False,  # a path may hold brackets
    )
    return 0


def _prepare_options(parser: ArgumentParser, defaults: dict[str, Any]) -> None:
    parser.add_argument("corpus", type=str, help="stdlib, a file, folder or glob, or hf:owner/name")
    parser.add_argument("--preset", type=str, default="demo", help=f"one of {', '.join(PRESETS)}")
    for name, kind in _CORPUS_FIELDS.items():
        parser.add_argument(f"--{name}", type=kind, default=defaults[name])
    parser.add_argument(
        "--workers", type=int, help="threads that tokenise (default, and most: one a core)"
    )
    parser.add_argument("--verify", action="store_true", help="check every shard by its hash")


# The settings of a run that its prepared corpus depends on.
_CORPUS_FIELDS: dict[str, Any] = {
    "tokenizer": str,
    "end_of_text": str | None,
    "text_column": str,
    "test_fraction": float,
    "split_seed": int,
    "max_tokens": int | None,
}


def _prepare(parsed: Namespace) -> int:
    fields = {name: parsed[name] for name in ("corpus", *_CORPUS_FIELDS)}
    with StopRequest():
        corpus = load_corpus(RunConfig.from_dict(fields), workers=parsed.workers)
        if parsed.verify:
            corpus.verify()
    for split in ("train", "test"):
        counts = corpus.manifest[split]
        console.print(
            f"{split:5} {counts['tokens']:,} tokens, SHA-256 {counts['sha256']}",
            highlight=False,
            soft_wrap=True,
        )
    _print_paths([corpus.folder])
    return 0


def _reproduce_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("figure", type=str, help=f"one of {', '.join(FIGURES)}")
    scales = "; ".join(f"{scale.name}: {scale.about}" for scale in SCALES.values())
    parser.add_argument("--scale", type=str, default="demo", help=scales)
    parser.add_argument("--seeds", type=int, nargs="+", help="one run each (default: 0)")
    parser.add_argument(
        "--variants", type=str, nargs="+", help="only these of the figure's (default: all)"
    )
    parser.add_argument("--out", type=str, default="runs", help="folder of the runs of all figures")
    _add_parallel(parser)
    _add_stop_after(parser)
    parser.add_argument("--cluster", type=str, default="local", help="local, or slurm: a job a run")
    parser.add_argument(
        "--cluster_options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="of submitit's executor, such as slurm_partition=gpu gpus_per_node=1 timeout_min=600",
    )
    parser.add_argument("--dry_run", action="store_true", help="print every run and its cost only")
    parser.add_argument("--gpu", type=str, default="A100-80GB", help=f"of {', '.join(GPUS)}")
    parser.add_argument(
        "--with",
        dest="fields",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of every run that win over the scale's, such as steps=200",
    )


def _reproduce(parsed: Namespace) -> int:
    fields, root = parse_fields(parsed.fields), Path(parsed.out)
    if parsed.dry_run:
        plan = plan_table(
            parsed.figure,
            parsed.scale,
            root,
            parsed.gpu,
            seeds=parsed.seeds,
            variants=parsed.variants,
            fields=fields,
        )
        _print_whole(rich_plan(plan, parsed.gpu))
        return 0
    paths = reproduce(
        parsed.figure,
        parsed.scale,
        root,
        seeds=parsed.seeds,
        variants=parsed.variants,
        parallel=parsed.parallel,
        cluster=parsed.cluster,
        cluster_options=parse_fields(parsed.cluster_options),
        fields=fields,
        stop_after=_stop_after(parsed),
        console=console,
    )
    _print_paths(paths)
    return 0


def _claims_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("runs", type=str, nargs="?", default="runs", help="folder of the runs")
    parser.add_argument("--scale", type=str, default="demo", help=f"one of {', '.join(SCALES)}")


def _claims(parsed: Namespace) -> int:
    root = Path(parsed.runs)
    found = finished_runs(parsed.scale, root)
    if not found:
        raise ValueError(
            f"No finished run of scale {parsed.scale!r} in {root}: make some with softmax-rnn "
            f"reproduce figure4 --scale {parsed.scale} --out {root}."
        )
    verdicts = judge(found)
    _print_whole(rich_verdicts(verdicts))
    path = root / parsed.scale / "claims.json"
    write_json(path, verdict_table(verdicts))
    _print_paths([path])
    return 0


def _generate_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("checkpoint", type=str, help="folder of a run or of a saved model")
    parser.add_argument("--prompt", type=str, required=True, help="the text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="at most this many")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--top_k", type=int, help="sample among this many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--cache", type=str, default="auto", help=f"one of {', '.join(CACHES)}")


def _generate(parsed: Namespace) -> int:
    transformers_logging.disable_progress_bar()
    made = generate(
        Path(parsed.checkpoint),
        parsed.prompt,
        max_new_tokens=parsed.max_new_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        seed=parsed.seed,
        cache=parsed.cache,
        streamed=True,
    )
    console.print(f"\n{made}", highlight=False, soft_wrap=True, markup=False)
    return 0


def _analyze_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("checkpoint", type=str, help="folder of a run or of a saved model")
    parser.add_argument("--corpus", type=str, help="text to measure on (default: the run's own)")
    parser.add_argument("--blocks", type=int, default=16, help="test blocks to measure on")
    parser.add_argument("--order", type=int, default=10, help="highest power to show")
    parser.add_argument(
        "--tolerance", type=float, default=1e-2, help="of an output's relative error"
    )
    parser.add_argument("--out", type=str, help="folder to write to (default: the checkpoint's)")


def _analyze(parsed: Namespace) -> int:
    checkpoint = Path(parsed.checkpoint)
    folder = Path(parsed.out or checkpoint)
    require_writable(folder)  # before the work
    transformers_logging.disable_progress_bar()
    found = analyze_checkpoint(
        checkpoint,
        blocks=parsed.blocks,
        order=parsed.order,
        tolerance=parsed.tolerance,
        corpus=parsed.corpus,
    )
    _print_whole(found.table())
    _print_paths([*write(found, folder), *draw(found, folder, title=checkpoint.name)])
    return 0


def _report_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("runs", type=str, help="folder with runs")


def _report(parsed: Namespace) -> int:
    root = Path(parsed.runs)
    _report_on(find_runs(root), root)
    return 0


def _report_on(runs: list[Any], root: Path) -> None:
    table, paths = report(runs, root)
    _print_whole(rich_table(table))
    _print_paths(paths)


def _variants(_: Namespace) -> int:
    for name, spec in variants().items():
        plain = AttentionSpec().to_dict()
        changed = {key: value for key, value in spec.to_dict().items() if value != plain[key]}
        made_of = ", ".join(f"{key}={value}" for key, value in changed.items())
        console.print(f"{name:18}{made_of}", highlight=False, soft_wrap=True)
    return 0


def _print_whole(shown: RenderableType) -> None:
    """On a narrow terminal a line that wraps is better than a number cut off."""
    wide = Console(width=1000)
    wide.width = max(console.width, Measurement.get(wide, wide.options, shown).maximum)
    wide.print(shown)


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True, markup=False)


COMMANDS: dict[str, Command] = {
    "compare": Command(
        "train variants side by side, then report",
        _compare_options,
        _compare,
        about="Train variants side by side and report: the main command. Given again, it goes on "
        "where it stopped.",
        epilog=f"Variants: {', '.join(variants())}; families take an order, as in taylor:4.",
    ),
    "train": Command("train one variant", _train_options, _train),
    "prepare": Command(
        "tokenise a corpus once",
        _prepare_options,
        _prepare,
        about="Tokenise a corpus of any size into shards; given again, it goes on after the last "
        "finished shard. Runs with the same settings find it.",
    ),
    "reproduce": Command(
        "make a figure of the paper",
        _reproduce_options,
        _reproduce,
        about="Run what is missing of a figure of the paper and draw it. Figures share their runs; "
        "rerun the same command to resume.",
    ),
    "claims": Command(
        "a verdict on every claim of the paper",
        _claims_options,
        _claims,
        about="A verdict on each of the paper's eleven claims from the runs that are there.",
    ),
    "report": Command("table, figure and page of finished runs", _report_options, _report),
    "generate": Command(
        "continue a prompt with a trained model",
        _generate_options,
        _generate,
        about="Continue a prompt, as it comes, and say which cache was used and what it costs.",
    ),
    "analyze": Command(
        "the powers that a trained model's heads use",
        _analyze_options,
        _analyze,
        about="How large each power's term is in every head on real text, and the order a head "
        "needs to be softmax to a tolerance.",
    ),
    "variants": Command("list the variants", lambda parser, defaults: None, _variants),
}
