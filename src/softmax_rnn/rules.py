"""Plain data that comes from outside: YAML, and what a field must be, in words and as a test."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Rule(NamedTuple):
    """What a value must be.

    Attributes:
        words: as an error says it.
        fits: whether a value is that.
    """

    words: str
    fits: Callable[[Any], bool]


def whole(least: int = 0) -> Rule:
    """An integer from ``least`` on, which a float can hold as well."""
    return Rule(f"a whole number >= {least}", lambda x: type(x) is int and least <= x < 2**53)


def _is_number(x: object) -> bool:
    # Squares and sums of numbers up to the bound stay finite.
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e100


NUMBER = Rule("a finite number", _is_number)
POSITIVE = Rule("a finite number >= 0", lambda x: _is_number(x) and x >= 0)
TEXT = Rule("text", lambda x: isinstance(x, str))
MAPPING = Rule("a mapping", lambda x: isinstance(x, dict))
HASH = Rule(
    "64 hexadecimal digits",
    lambda x: isinstance(x, str) and re.fullmatch("[0-9a-f]{64}", x) is not None,
)


def require(path: Path, data: Any, rules: Mapping[str, Rule], where: str = "") -> None:
    """Check the fields of a mapping.

    Args:
        path: the file it is from.
        data: the mapping.
        rules: by field; other fields may hold anything.
        where: what stands before a field's name in an error, such as ``train.``.

    Raises:
        ValueError: naming the file and the field, what it must be and what it is.
    """
    if not isinstance(data, Mapping):
        raise wrong(path, where.rstrip(".") or "all of it", MAPPING.words, data)
    for key, rule in rules.items():
        if key not in data:
            raise ValueError(f"{path}: {where}{key} is missing.")
        if not rule.fits(data[key]):
            raise wrong(path, where + key, rule.words, data[key])


def wrong(path: Path, what: str, expected: str, found: Any) -> ValueError:
    """The error for a value that is not what it must be."""
    return ValueError(f"{path}: {what} must be {expected}, not {shown(found)}.")


def shown(value: Any) -> str:
    """A value in an error: as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def parse_yaml(text: str | bytes, where: object) -> Any:
    """The plain data of a YAML document; ``where`` it is from stands in the error.

    Raises:
        ValueError: if it is none, has a key twice, or has aliases, with which a few lines can hold
            billions of values.
    """
    try:
        return _PlainLoader(text.decode() if isinstance(text, bytes) else text).get_single_data()
    except Exception as error:  # PyYAML lets those of its converters through
        raise ValueError(f"{where} is not YAML: {error}") from error


def parse_fields(words: Sequence[str]) -> dict[str, Any]:
    """Settings given as ``KEY=VALUE`` words, the values as YAML.

    Raises:
        ValueError: for a word that is none, a key given twice, a value that is not YAML.
    """
    fields = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"Settings are KEY=VALUE words, not {word!r}.")
        if key in fields:
            raise ValueError(f"The setting {key!r} is given twice.")
        fields[key] = parse_yaml(value, f"The setting {word!r}")
    return fields


def format_yaml(data: Any) -> str:
    """Plain data as a YAML document, which :func:`parse_yaml` reads again."""
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)


class _PlainDumper(yaml.SafeDumper):
    """Escapes the line breaks of Unicode, which PyYAML writes as they are and reads as spaces."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if _BREAKS.intersection(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_BREAKS = frozenset("\x85\u2028\u2029")
_PlainDumper.add_representer(str, _PlainDumper.represent_str)


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias, which is not taken", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key stands twice", problem_mark=node.start_mark)
        return mapping
