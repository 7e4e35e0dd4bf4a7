"""Shared by the commands: how one is described, common options, and printing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from softmax_rnn.experiments.costs import GPUS
from softmax_rnn.training.config import PRESETS, RunConfig
from softmax_rnn.training.stopping import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

CACHES = ("auto", "recurrent", "key-value", "none")  # of generate


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        help: one line for the list of commands.
        options: adds its options to a parser; takes the default settings of a run.
        run: executes it and returns the exit code. It imports what it needs when it is called, so
            that parsing stays fast.
        about: its description; by default ``help`` as a sentence.
        epilog: printed below its options.
        extra: the optional dependency group that it needs.
    """

    help: str
    options: Callable[[ArgumentParser, dict[str, Any]], None]
    run: Callable[[Namespace], int]
    about: str = ""
    epilog: str = ""
    extra: str = "train"


def add_preset(parser: ArgumentParser) -> None:
    """Add ``--preset``, whose fields are the defaults of all other options."""
    parser.add_argument("--preset", type=str, default="demo", help=f"one of {', '.join(PRESETS)}")


def add_config(parser: ArgumentParser, defaults: dict[str, Any], skip: set[str]) -> None:
    """Add ``--config``, ``--preset`` and an option per field of a run, except those in ``skip``."""
    parser.add_argument("--config", action="config", help="YAML file with the options below")
    add_preset(parser)
    parser.add_class_arguments(RunConfig, skip=skip)
    parser.set_defaults({key: value for key, value in defaults.items() if key not in skip})


# The settings that a prepared corpus depends on, besides its name and its tokenizer.
CORPUS_FIELDS = (
    *("text_column", "encoding", "bad_files", "end_of_text"),
    *("test_fraction", "split_seed", "max_tokens"),
)


class _Corpus(RunConfig):
    """How the corpus is read."""


def add_corpus(parser: ArgumentParser, defaults: dict[str, Any], *more: str) -> None:
    """Add an option per field of ``CORPUS_FIELDS`` and ``more``, as for a run."""
    names = {*CORPUS_FIELDS, *more}
    parser.add_class_arguments(_Corpus, skip=RunConfig().to_dict().keys() - names)
    parser.set_defaults({name: defaults.get(name) for name in names})


def run_config(parsed: Namespace) -> RunConfig:
    """The run's configuration from the options that :func:`add_config` added."""
    given = vars(parsed)
    return RunConfig.from_dict({key: given[key] for key in RunConfig().to_dict() if key in given})


def add_stop_after(parser: ArgumentParser) -> None:
    """Add ``--stop-after``."""
    parser.add_argument(
        "--stop_after", type=str, help="save and stop after this time, for example 1h50m or 90s"
    )


def stop_after(parsed: Namespace) -> float | None:
    """``--stop-after`` in seconds."""
    return None if parsed.stop_after is None else seconds(parsed.stop_after)


def add_dry_run(parser: ArgumentParser, what: str) -> None:
    """Add ``--dry-run``, which prints ``what`` and its cost, and ``--gpu``."""
    parser.add_argument(
        "--dry_run", action="store_true", help=f"print every {what} and its cost, and run nothing"
    )
    parser.add_argument(
        "--gpu",
        type=str,
        help=f"GPU for which --dry_run estimates times: one of {', '.join(GPUS)} (default: this "
        "machine's, if it has one of these)",
    )


def show(table: RenderableType) -> None:
    """Print a table uncut: on a narrow terminal its lines wrap."""
    from rich.console import Console
    from rich.measure import Measurement

    wide = Console(width=1000)
    wide.width = max(Console().width, Measurement.get(wide, wide.options, table).maximum)
    wide.print(table)


def show_paths(paths: Iterable[Path]) -> None:
    """Print the paths of files that were written."""
    for path in paths:
        print(f"  {path}")


def write_report(runs: Sequence[Any], root: Path) -> None:
    """Write the report of finished runs into ``root``, and print its table."""
    from softmax_rnn.report.outputs import report
    from softmax_rnn.report.table import rich_table

    table, paths = report(runs, root)
    show(rich_table(table))
    show_paths(paths)
