"""The command-line parser. It imports nothing slow: a command imports what it runs when called."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from softmax_rnn import __version__
from softmax_rnn._utils.errors import EXIT_CODES
from softmax_rnn._utils.plain_yaml import parse_yaml
from softmax_rnn.cli import (
    convert_command,
    doctor,
    evaluate_command,
    result_commands,
    run_commands,
)
from softmax_rnn.training.config import RunConfig

COMMANDS = {
    **run_commands.COMMANDS,
    **convert_command.COMMANDS,
    **result_commands.COMMANDS,
    **evaluate_command.COMMANDS,
    **doctor.COMMANDS,
}


class _Parser(ArgumentParser):
    """Reports an error in one line with the nearest option, and shows options with hyphens."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and the name nearest to a mistyped one; exit with code 2."""
        known = {name.lstrip("-"): name for name in self._names()}
        for word in re.findall(r"[\w-]+", message):
            if word in known or word in known.values():
                continue
            if near := difflib.get_close_matches(word.lstrip("-"), known, n=1, cutoff=0.75):
                meant = known[near[0]] if word.startswith("-") else near[0]
                message = f"{message.rstrip('.')}. Did you mean {meant!r}?"
                break
        message = _of_value(message)
        print(f"error: {_hyphens(message)}\nHelp: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def format_help(self) -> str:
        """The help text with hyphens; options are parsed with underscores."""
        text = _hyphens(super().format_help())
        return re.sub(r"\n +\(required\)(?=\n)", "", text)  # a line of its own, of the commands

    def _names(self) -> list[str]:
        """All option and subcommand names, including the options of subcommands."""
        names: list[str] = []
        for action in self._actions:
            names += action.option_strings
            if isinstance(action.choices, dict):
                for name, parser in action.choices.items():
                    names += [name, *parser._names()]
        return names


def parse(words: Sequence[str]) -> tuple[str, Namespace]:
    """The command and its options; exits after ``--help``, ``--version`` or an error."""
    words = [_underscores(word) for word in words]
    parser = _Parser(
        prog="softmax-rnn",
        description="Softmax attention as a sum of RNNs: train, compare and analyse variants.",
        version=__version__,
        allow_abbrev=False,
        epilog=f"Exit codes: {'; '.join(f'{code} {about}' for code, about in EXIT_CODES.items())}.",
    )
    commands = parser.add_subcommands()
    for name, command in COMMANDS.items():
        about = command.about or f"{command.help[0].upper()}{command.help[1:]}."
        options = _Parser(description=about, epilog=command.epilog or None, allow_abbrev=False)
        if name in words:  # building the options of all commands would be slow
            command.options(options, _preset(words))
        commands.add_subcommand(name, options, help=command.help)
    parsed = parser.parse_args(words)
    return parsed.subcommand, parsed[parsed.subcommand]


# Types, as jsonargparse writes them.
_TYPES = {
    "<class 'int'>": "an integer",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'NoneType'>": "null",
    "<class 'dict'>": "a mapping",
}


def _of_value(message: str) -> str:
    """In one sentence, which value an option must have; any other message as it is."""
    name = re.match(r'Parser key "([\w.]+)":', message)
    kinds = re.findall(r"Expected an? (.+?)(?:\. Got value|$)", message, re.MULTILINE)
    value = re.search(r"(?:Given|Got) value: (.*)", message, re.DOTALL)
    if not (name and kinds and value):
        return message
    kinds = [re.sub(r".*Literal\[(.*)\]", r"one of \1", _TYPES.get(x, x)) for x in kinds]
    return f"--{name[1]} must be {' or '.join(kinds)}, not {value[1]}."


def with_flags(words: Sequence[str], message: str) -> str:
    """The message of an error with its settings as the options of the command of ``words``.

    ``block_size=3`` and ``block_size`` become ``--block-size 3`` and ``--block-size``. Names in
    quotes, paths and lists stay as they are, and so do settings that are no option of the command:
    those of ``--with`` and of files.
    """
    known = next((COMMANDS[word] for word in words if word in COMMANDS), None)
    if known is None:
        return _hyphens(message)
    parser = _Parser(add_help=False)
    known.options(parser, RunConfig().to_dict())
    names = {name[2:] for name in parser._names() if name.startswith("--")}

    def flag(found: re.Match[str]) -> str:
        name = found["name"]
        listed = found["comma"] or message[found.start() - 2 : found.start()] == ", "
        meant = found["equals"] is not None or (not listed and (found.start() == 0 or "_" in name))
        after = " " if found["equals"] else found["comma"] or ""
        return f"--{name}{after}" if meant and name in names else found[0]

    word = r"(?<![\w./\\'\"`-])(?P<name>[a-z]\w*)(?![\w/\\'\"`-]|\.\w)"
    return _hyphens(re.sub(rf"{word}(?:(?P<equals>=)|(?P<comma>,))?", flag, message))


def _hyphens(text: str) -> str:
    """Write every ``--block_size`` in a text as ``--block-size``."""
    return re.sub(r"(?<![\w-])--\w+", lambda option: option[0].replace("_", "-"), text)


def _underscores(word: str) -> str:
    """Write ``--block-size`` as ``--block_size``; a value after ``=`` is unchanged."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def _preset(words: Sequence[str]) -> dict[str, Any]:
    """The fields of the preset that ``--preset``, or else ``preset`` in a ``--config``, names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    parser.add_argument("--config", nargs="?", action="append", default=[])
    given = parser.parse_known_args(list(words))[0]
    name = given.preset
    for path in reversed(given.config):
        name = name or _preset_of(path)
    return RunConfig.preset(name or "demo").to_dict()


def _preset_of(path: str | None) -> str | None:
    """The ``preset`` that a YAML file names; ``ValueError`` if the file is invalid."""
    file = Path(path or "")
    if not file.is_file():
        return None  # the parser reports a missing file
    # This refuses aliases, which jsonargparse would expand without limit.
    data = parse_yaml(file.read_bytes(), file)
    name = data.get("preset") if isinstance(data, dict) else None
    return None if name is None else str(name)
