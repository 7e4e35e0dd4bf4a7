"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.measure import Measurement
from torch import OutOfMemoryError

from softmax_rnn.experiments import compare_configs, run_all
from softmax_rnn.experiments.compare import RunsFailedError
from softmax_rnn.report import find_runs, report
from softmax_rnn.report.table import rich_table
from softmax_rnn.spec import AttentionSpec
from softmax_rnn.training import PRESETS, RunConfig, train
from softmax_rnn.training.trainer import NonFiniteError
from softmax_rnn.variants import variants
from softmax_rnn.version import __version__

DEMO = ("softmax", "norm", "gate", "linear_elu", "linear_relu", "linear_cosine")
console = Console()


class _Parser(ArgumentParser):
    """Says what is wrong in a line, with the nearest option, and not the whole usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message, the nearest name to what was mistyped, and exit with 2."""
        known = self._names()
        for word in re.findall(r"[\w-]+", message):
            if word in known:
                continue
            near = difflib.get_close_matches(word.lstrip("-"), known, n=1, cutoff=0.75)
            if near and word.lstrip("-") not in known:
                message += f" Did you mean {near[0]!r}?"
                break
        print(f"error: {message}\nHelp: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _names(self) -> list[str]:
        """The options and subcommands, those of the subcommands included."""
        names: list[str] = []
        for action in self._actions:
            names += [name.lstrip("-") for name in action.option_strings]
            if isinstance(action.choices, dict):
                for name, parser in action.choices.items():
                    names += [name, *parser._names()]
        return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 1 for a failed run, 2 for a user's mistake."""
    words = [_underscored(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    try:
        parsed = _parser(_preset(words)).parse_args(words)
        return _COMMANDS[parsed.subcommand](parsed[parsed.subcommand])
    except (ValueError, FileNotFoundError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (NonFiniteError, RunsFailedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OverflowError, FloatingPointError, MemoryError, OutOfMemoryError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch has no class for it on the CPU
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        resume = " with --resume" if words[0] == "train" and "--resume" not in words else ""
        print(f"stopped; the same command{resume} goes on", file=sys.stderr)
        return 130


def _underscored(word: str) -> str:
    """``--block-size`` is ``--block_size``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _preset(words: Sequence[str]) -> dict[str, Any]:
    """The defaults that ``--preset``, or ``preset`` of a --config, asks for; all else wins."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    parser.add_argument("--config", nargs="?", action="append", default=[])
    given = parser.parse_known_args(list(words))[0]
    name = given.preset
    for path in reversed(given.config):
        name = name or _preset_of(path)
    return RunConfig.preset(name or "demo").to_dict()


def _preset_of(path: str | None) -> str | None:
    """The ``preset`` of a YAML file; what is wrong with the file is told when it is parsed."""
    try:
        data = yaml.safe_load(Path(path or "").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = data.get("preset") if isinstance(data, dict) else None
    return None if name is None else str(name)


def _parser(defaults: dict[str, Any]) -> ArgumentParser:
    parser = _Parser(
        prog="softmax-rnn",
        description="Softmax attention as a sum of RNNs: train, compare and understand variants.",
        version=__version__,
    )
    commands = parser.add_subcommands()

    compare = _Parser(
        description="Train variants side by side and report: the main command. Given again, it "
        "goes on where it stopped.",
        epilog=f"Variants: {', '.join(variants())}; families take an order, as in taylor:4.",
    )
    compare.add_argument("variants", nargs="*", default=list(DEMO), help="variants to train")
    compare.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each")
    compare.add_argument("--out", type=str, default="runs/compare", help="folder of the runs")
    compare.add_argument("--parallel", type=int, help="runs at a time (default: one a GPU or core)")
    _add_run_options(compare, defaults, skip={"attention", "seed"})
    commands.add_subcommand("compare", compare, help="train variants side by side, then report")

    single = _Parser(description="Train one variant.")
    single.add_argument("--out", type=str, default="runs/train", help="the run's folder")
    single.add_argument("--resume", action="store_true", help="go on with an unfinished run")
    _add_run_options(single, defaults, skip=set())
    commands.add_subcommand("train", single, help="train one variant")

    again = _Parser(description="Table, figure and page of the finished runs below a folder.")
    again.add_argument("runs", type=str, help="folder with runs")
    commands.add_subcommand("report", again, help="table, figure and page of finished runs")

    names = _Parser(description="The paper's variants and what each is made of.")
    commands.add_subcommand("variants", names, help="list the variants")
    return parser


def _add_run_options(parser: ArgumentParser, defaults: dict[str, Any], skip: set[str]) -> None:
    parser.add_argument("--config", action="config", help="YAML file with options below")
    parser.add_argument("--preset", type=str, default="demo", help=f"one of {', '.join(PRESETS)}")
    parser.add_class_arguments(RunConfig, skip=skip)
    parser.set_defaults({key: value for key, value in defaults.items() if key not in skip})


def _run_config(parsed: Namespace) -> RunConfig:
    given = vars(parsed)
    return RunConfig.from_dict({key: given[key] for key in RunConfig().to_dict() if key in given})


def _compare(parsed: Namespace) -> int:
    root = Path(parsed.out)
    runs = compare_configs(parsed.variants, parsed.seeds, _run_config(parsed), root)
    failure = None
    try:
        run_all(runs, root, parallel=parsed.parallel, console=console)
    except RunsFailedError as error:
        failure = error
    finished = [run.folder for run in runs if run.folder.finished]
    if finished:
        _show(finished, root)
    if failure is not None:
        raise failure
    return 0


def _train(parsed: Namespace) -> int:
    folder = train(_run_config(parsed), Path(parsed.out), resume=parsed.resume)
    summary = folder.summary
    console.print(
        f"{folder.path}: {summary['steps']} steps, train loss {summary['train_loss']:.4f}, "
        f"test loss {summary['test_loss']:.4f}"
    )
    return 0


def _report(parsed: Namespace) -> int:
    root = Path(parsed.runs)
    _show(find_runs(root), root)
    return 0


def _show(runs: list[Any], root: Path) -> None:
    table, paths = report(runs, root)
    shown = rich_table(table)
    # On a narrow terminal a line that wraps is better than a number cut off.
    wide = Console(width=1000)
    wide.width = max(console.width, Measurement.get(wide, wide.options, shown).maximum)
    wide.print(shown)
    for path in paths:
        console.print(f"  {path}", highlight=False)


def _variants(_: Namespace) -> int:
    for name, spec in variants().items():
        plain = AttentionSpec().to_dict()
        changed = {key: value for key, value in spec.to_dict().items() if value != plain[key]}
        made_of = ", ".join(f"{key}={value}" for key, value in changed.items())
        console.print(f"{name:18}{made_of}", highlight=False, soft_wrap=True)
    return 0


_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "compare": _compare,
    "train": _train,
    "report": _report,
    "variants": _variants,
}
