"""The commands that train or prepare: train, prepare, compare, reproduce."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from softmax_rnn import variants
from softmax_rnn._utils.errors import require_choice
from softmax_rnn._utils.plain_yaml import parse_fields
from softmax_rnn.cli.command import (
    CORPUS_FIELDS,
    Command,
    add_config,
    add_corpus,
    add_dry_run,
    add_preset,
    add_stop_after,
    run_config,
    show,
    show_paths,
    stop_after,
    write_report,
)
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.stopping import StopRequest, time_left

if TYPE_CHECKING:
    from softmax_rnn.experiments.plan import PlannedRun

_DEMO = ("softmax", "norm", "gate", "linear_elu", "linear_relu", "linear_cosine")


def _train_options(parser: ArgumentParser, defaults: dict[str, Any]) -> None:
    parser.add_argument("--out", type=str, default="runs/train", help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="resume an unfinished run")
    add_stop_after(parser)
    add_config(parser, defaults, skip=set())


def _train(parsed: Namespace) -> int:
    from softmax_rnn.data import is_task
    from softmax_rnn.training import train

    folder = train(
        run_config(parsed),
        Path(parsed.out),
        resume=parsed.resume,
        stop_after=stop_after(parsed),
    )
    if os.environ.get("RANK", "0") == "0":  # one process of a run prints for all
        summary = folder.summary
        asked = is_task(parsed.corpus)
        accuracy = f", test accuracy {summary['test_accuracy']:.4f}" if asked else ""
        print(
            f"{folder.path}: {summary['steps']} steps, train loss {summary['train_loss']:.4f}, "
            f"test loss {summary['test_loss']:.4f}{accuracy}"
        )
    return 0


def _prepare_options(parser: ArgumentParser, defaults: dict[str, Any]) -> None:
    parser.add_argument("corpus", type=str, help="stdlib, a file, folder or glob, or hf:owner/name")
    add_preset(parser)
    add_corpus(parser, defaults, "tokenizer")
    parser.add_argument(
        "--workers", type=int, help="threads that tokenise (default and maximum: one per core)"
    )
    parser.add_argument("--verify", action="store_true", help="check the hash of every shard")


def _prepare(parsed: Namespace) -> int:
    from softmax_rnn.data import is_task
    from softmax_rnn.training.run import load_corpus

    fields = {name: parsed[name] for name in ("corpus", "tokenizer", *CORPUS_FIELDS)}
    if is_task(parsed.corpus):
        raise ValueError(f"{parsed.corpus} is a task: its rows are drawn, so nothing is prepared.")
    with StopRequest():
        corpus = load_corpus(RunConfig.from_dict(fields), workers=parsed.workers)
        if parsed.verify:
            corpus.verify()
    for split in ("train", "test"):
        counts = corpus.manifest[split]
        print(f"{split:5} {counts['tokens']:,} tokens, SHA-256 {counts['sha256']}")
    show_paths([corpus.folder])
    return 0


def _compare_options(parser: ArgumentParser, defaults: dict[str, Any]) -> None:
    parser.add_argument(
        "variants",
        nargs="*",
        default=list(_DEMO),
        metavar="VARIANT | NAME=VARIANT | NAME=FILE.yaml",
        help="what to train: variants, or your own attentions as YAML files with fields of "
        "AttentionSpec, and under layer: fields of LayerOptions",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="one run per variant and seed"
    )
    parser.add_argument("--out", type=str, default="runs/compare", help="folder of the runs")
    _add_scheduling(parser)
    add_config(parser, defaults, skip={"attention", "seed"})


def _compare(parsed: Namespace) -> int:
    from softmax_rnn.experiments.compare import compare_configs

    root = Path(parsed.out)
    runs = compare_configs(parsed.variants, parsed.seeds, run_config(parsed), root)

    def report() -> None:
        write_report([run.folder for run in runs if run.folder.finished], root)

    return _plan_or_run(parsed, runs, root, report)


def _reproduce_options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("figure", type=str, help=f"one of {', '.join(FIGURES)}")
    scales = "; ".join(f"{scale.name}: {scale.about}" for scale in SCALES.values())
    parser.add_argument("--scale", type=str, default="demo", help=scales)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="one run per variant and seed"
    )
    parser.add_argument(
        "--variants", type=str, nargs="+", help="some of the figure's variants (default: all)"
    )
    parser.add_argument("--out", type=str, default="runs", help="folder of the runs of all figures")
    _add_scheduling(parser)
    parser.add_argument(
        "--with",
        dest="fields",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of every run that override the scale's, such as steps=200",
    )
    parser.add_argument(
        "--sweep",
        type=str,
        metavar="SETTING=VALUE,VALUE,...",
        help="first try each of these values on validation documents, for each variant, with one "
        "seed, and more while the best is the first or the last; then run it with its best, as in "
        "--sweep learning_rate=5e-4,1e-3,2e-3,4e-3",
    )


def _reproduce(parsed: Namespace) -> int:
    require_choice("figure", parsed.figure, FIGURES)
    require_choice("scale", parsed.scale, SCALES)
    from softmax_rnn.experiments.reproduce import figure_runs, report_figure
    from softmax_rnn.experiments.sweep import Search, Sweep, copy_finished

    left = time_left(stop_after(parsed))
    experiment, scale, root = FIGURES[parsed.figure], SCALES[parsed.scale], Path(parsed.out)
    plain, fields = scale, parse_fields(parsed.fields)
    if parsed.variants is not None:
        experiment = experiment.only(parsed.variants)
    sweep = Sweep.parse(parsed.sweep) if parsed.sweep else None
    if sweep is not None:
        scale = plain.with_best(sweep.setting)
    elif experiment.sweep and Sweep.parse(experiment.sweep).setting not in fields:
        sweep = Sweep.parse(experiment.sweep)

    def report() -> None:
        show_paths(report_figure(experiment, scale, root, parsed.seeds))

    place, unsteady = root / scale.folder, experiment.kind == "stability"
    if sweep is None:
        runs = figure_runs(experiment, scale, root, parsed.seeds, fields)
        return _plan_or_run(parsed, runs, place, report, left, unsteady)
    search = Search(experiment, plain, root, fields, sweep)
    if parsed.dry_run:
        runs = [*search.runs(), *figure_runs(experiment, scale, root, parsed.seeds, fields)]
        print("Trials are added while the best value of a variant is the first or the last.")
        return _plan_or_run(parsed, runs, root, report, left)
    trials = root / plain.folder
    search.execute(lambda runs: _run(parsed, runs, trials, left, may_diverge=True))
    print(f"Chosen: {search.summary()}")
    search.record(scale)
    runs = figure_runs(experiment, scale, root, parsed.seeds, fields, search.chosen)
    if scale is not plain:
        copy_finished(runs, place, trials)
    return _plan_or_run(parsed, runs, place, report, left, unsteady)


def _add_scheduling(parser: ArgumentParser) -> None:
    """Add the options of :func:`_plan_or_run`."""
    parser.add_argument(
        "--parallel", type=int, help="runs at a time (default: one per GPU or core)"
    )
    add_stop_after(parser)
    parser.add_argument(
        "--cluster", type=str, default="local", help="local, or slurm: one job per run"
    )
    parser.add_argument(
        "--cluster_options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="parameters of submitit's executor, such as slurm_partition=gpu gpus_per_node=1",
    )
    add_dry_run(parser, "run")


def _plan_or_run(
    parsed: Namespace,
    runs: Sequence[PlannedRun],
    root: Path,
    report: Callable[[], None],
    left: Callable[[], float | None] | None = None,
    may_diverge: bool = False,
) -> int:
    """Print the plan of a set of runs, or execute the runs and report on the finished ones.

    ``left`` gives the seconds until the time limit, which by default counts from now. With
    ``may_diverge``, runs that diverge are part of the result.
    """
    import softmax_rnn.report.outputs  # noqa: F401 -- a missing package is an error before the runs
    from softmax_rnn.experiments.costs import chosen_gpu
    from softmax_rnn.experiments.plan import plan_table, rich_plan
    from softmax_rnn.experiments.scheduler import RunsFailedError

    if parsed.dry_run:
        from softmax_rnn.training.run import check_corpora

        gpu = chosen_gpu(parsed.gpu)
        check_corpora(run.config for run in runs if not run.folder.finished)
        show(rich_plan(plan_table(runs, root, gpu), gpu))
        return 0
    try:
        _run(parsed, runs, root, left, may_diverge)
    except RunsFailedError:
        if any(run.folder.finished for run in runs):
            report()
        raise
    report()
    return 0


def _run(
    parsed: Namespace,
    runs: Sequence[PlannedRun],
    root: Path,
    left: Callable[[], float | None] | None = None,
    may_diverge: bool = False,
) -> None:
    """Execute a set of runs; ``left`` is as in :func:`_plan_or_run`."""
    from softmax_rnn.experiments.scheduler import run_all

    run_all(
        runs,
        root,
        parallel=parsed.parallel,
        cluster=parsed.cluster,
        cluster_options=parse_fields(parsed.cluster_options),
        stop_after=stop_after(parsed) if left is None else left(),
        may_diverge=may_diverge,
    )


COMMANDS = {
    "compare": Command(
        "train variants side by side, then report",
        _compare_options,
        _compare,
        about="Train variants side by side and write a report: the main command. Rerun it to "
        "resume.",
        epilog=f"Variants: {', '.join(variants())}; families take any number, as in taylor:4.",
        extra="report",
    ),
    "train": Command("train one variant", _train_options, _train),
    "prepare": Command(
        "tokenise a corpus once",
        _prepare_options,
        _prepare,
        about="Tokenise a corpus of any size into shards. Rerun it to resume after the last "
        "finished shard. Runs with the same settings use the shards.",
    ),
    "reproduce": Command(
        "reproduce a figure",
        _reproduce_options,
        _reproduce,
        about="Train the missing runs of a figure, and draw it. The figures are the paper's; "
        "others are ours: family and flagship (decays, polynomials and windows, and loss against "
        "the size of the state), additions (rotary positions and convolutions), gaps (losses minus "
        "softmax's, against tokens), stability (spikes and divergence, against the learning rate), "
        "sequel (2mamba step by step), recall and tasks (synthetic tasks). "
        "Figures share their runs. Rerun it to resume.",
        extra="report",
    ),
}
