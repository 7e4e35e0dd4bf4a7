"""The parser of the command line. It imports nothing slow: every command imports what it runs."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from softmax_rnn import __version__
from softmax_rnn._utils.errors import EXIT_CODES
from softmax_rnn.cli import result_commands, run_commands
from softmax_rnn.training.config import RunConfig

COMMANDS = {**run_commands.COMMANDS, **result_commands.COMMANDS}


class _Parser(ArgumentParser):
    """Names an error in one line, with the nearest option; shows hyphens in options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message, the nearest name to a mistyped one, and exit with 2."""
        known = {name.lstrip("-"): name for name in self._names()}
        for word in re.findall(r"[\w-]+", message):
            if word in known or word in known.values():
                continue
            if near := difflib.get_close_matches(word.lstrip("-"), known, n=1, cutoff=0.75):
                meant = known[near[0]] if word.startswith("-") else near[0]
                message = f"{message.rstrip('.')}. Did you mean {meant!r}?"
                break
        print(f"error: {_hyphens(message)}\nHelp: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def format_help(self) -> str:
        """The help; options are parsed with underscores."""
        return _hyphens(super().format_help())

    def _names(self) -> list[str]:
        """The options and subcommands, those of the subcommands included."""
        names: list[str] = []
        for action in self._actions:
            names += action.option_strings
            if isinstance(action.choices, dict):
                for name, parser in action.choices.items():
                    names += [name, *parser._names()]
        return names


def parse(words: Sequence[str]) -> tuple[str, Namespace]:
    """The command and its options; exits after ``--help``, ``--version`` or a mistake."""
    words = [_underscores(word) for word in words]
    parsed = _parser(words, {}).parse_args(words)
    if (preset := parsed[parsed.subcommand].get("preset", "demo")) != "demo":
        parsed = _parser(words, RunConfig.preset(preset).to_dict()).parse_args(words)
    return parsed.subcommand, parsed[parsed.subcommand]


def _parser(words: Sequence[str], defaults: dict[str, Any]) -> ArgumentParser:
    """The parser of a command line, with the defaults of a preset; demo's are those of a run."""
    parser = _Parser(
        prog="softmax-rnn",
        description="Softmax attention as a sum of RNNs: train, compare and understand variants.",
        version=__version__,
        allow_abbrev=False,
        epilog=f"Exit codes: {'; '.join(f'{code} {about}' for code, about in EXIT_CODES.items())}.",
    )
    commands = parser.add_subcommands()
    for name, command in COMMANDS.items():
        about = command.about or f"{command.help[0].upper()}{command.help[1:]}."
        options = _Parser(description=about, epilog=command.epilog or None, allow_abbrev=False)
        if name in words:  # the options of the others are not asked for
            command.options(options, {**RunConfig().to_dict(), **defaults})
        commands.add_subcommand(name, options, help=command.help)
    return parser


def _hyphens(text: str) -> str:
    """``--block-size`` for ``--block_size``, all over a text."""
    return re.sub(r"(?<![\w-])--\w+", lambda option: option[0].replace("_", "-"), text)


def _underscores(word: str) -> str:
    """``--block_size`` for ``--block-size``; a value after ``=`` stays as it is."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word
