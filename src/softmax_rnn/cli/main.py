"""The command line: parse, call, and an exit code for what went wrong."""

from __future__ import annotations

import argparse
import atexit
import difflib
import faulthandler
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from torch import OutOfMemoryError

from softmax_rnn import __version__
from softmax_rnn._utils.errors import EXIT_CODES, ExitCode
from softmax_rnn._utils.files import UNUSABLE
from softmax_rnn._utils.plain_yaml import parse_yaml
from softmax_rnn.cli.commands import COMMANDS
from softmax_rnn.experiments.compare import RunsFailedError
from softmax_rnn.training import RunConfig
from softmax_rnn.training.loop import NonFiniteError
from softmax_rnn.training.stopping import RunStopped, StopRequest


class _Parser(ArgumentParser):
    """Says what is wrong in a line, with the nearest option, and not the whole usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message, the nearest name to what was mistyped, and exit with 2."""
        known = {name.lstrip("-"): name for name in self._names()}
        for word in re.findall(r"[\w-]+", message):
            if word in known or word in known.values():
                continue
            if near := difflib.get_close_matches(word.lstrip("-"), known, n=1, cutoff=0.75):
                meant = known[near[0]] if word.startswith("-") else near[0]
                message = f"{message.rstrip('.')}. Did you mean {meant!r}?"
                break
        print(f"error: {message}\nHelp: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _names(self) -> list[str]:
        """The options and subcommands, those of the subcommands included."""
        names: list[str] = []
        for action in self._actions:
            names += action.option_strings
            if isinstance(action.choices, dict):
                for name, parser in action.choices.items():
                    names += [name, *parser._names()]
        return names


def process() -> NoReturn:
    """The command of this process, which ends with its exit code."""
    StopRequest.ends_process = True
    code = main()
    if code == ExitCode.STOPPED or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        # An interpreter that ends takes no signals, so that one more would decide how; and a thread
        # of gloo that lets go of a tensor meanwhile would abort it.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its :class:`ExitCode`."""
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a mapped file that is cut short ends the process with SIGBUS
    words = [_underscored(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    try:
        parsed = _parser(_preset(words)).parse_args(words)
        return COMMANDS[parsed.subcommand].run(parsed[parsed.subcommand])
    except (ValueError, FileNotFoundError) as error:
        return _told(ExitCode.WRONG_INPUT, f"error: {error}")
    except OSError as error:
        users = error.errno in UNUSABLE
        return _told(ExitCode.WRONG_INPUT if users else ExitCode.FAILED, f"error: {error}")
    except (NonFiniteError, RunsFailedError) as error:
        return _told(ExitCode.FAILED, f"error: {error}")
    except (OverflowError, FloatingPointError, MemoryError, OutOfMemoryError) as error:
        return _told(ExitCode.FAILED, f"error: {type(error).__name__}: {error}")
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch has no class for it on the CPU
            raise
        return _told(ExitCode.FAILED, f"error: {error}")
    except RunStopped as stopped:
        return _told(ExitCode.STOPPED, f"{stopped}; {_again(words, stopped)}")
    except KeyboardInterrupt as stopped:
        return _told(ExitCode.INTERRUPTED, f"stopped; {_again(words, stopped)}")


def _told(code: ExitCode, message: str) -> int:
    print(message, file=sys.stderr)
    return code


def _again(words: Sequence[str], stopped: BaseException) -> str:
    if notes := getattr(stopped, "__notes__", None):  # of a corpus that was being prepared
        return f"{'; '.join(notes)}: the same command prepares it anew"
    resume = " with --resume" if words[0] == "train" and "--resume" not in words else ""
    return f"the same command{resume} goes on"


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
    """The ``preset`` of a YAML file; one that is not there is told when it is parsed."""
    file = Path(path or "")
    if not file.is_file():
        return None
    data = parse_yaml(file.read_bytes(), file)
    name = data.get("preset") if isinstance(data, dict) else None
    return None if name is None else str(name)


def _parser(defaults: dict[str, Any]) -> ArgumentParser:
    parser = _Parser(
        prog="softmax-rnn",
        description="Softmax attention as a sum of RNNs: train, compare and understand variants.",
        version=__version__,
        epilog=f"Exit codes: {'; '.join(f'{code} {about}' for code, about in EXIT_CODES.items())}.",
    )
    commands = parser.add_subcommands()

    for name, command in COMMANDS.items():
        about = command.about or f"{command.help[0].upper()}{command.help[1:]}."
        options = _Parser(description=about, epilog=command.epilog or None)
        command.options(options, defaults)
        commands.add_subcommand(name, options, help=command.help)
    return parser
