"""YAML as plain data: no objects, no aliases, no duplicate keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml


def parse_yaml(text: str | bytes, where: object) -> Any:
    """The plain data of a YAML document; ``where`` names its origin in errors.

    Raises:
        ValueError: if it is invalid, or has duplicate keys or aliases: with aliases a few lines
            can hold billions of values.
    """
    try:
        return _PlainLoader(text.decode() if isinstance(text, bytes) else text).get_single_data()
    except Exception as error:  # PyYAML also raises the errors of its converters
        raise ValueError(f"{where} is not YAML: {error}") from error


def parse_fields(words: Sequence[str]) -> dict[str, Any]:
    """Settings given as ``KEY=VALUE`` words, the values as YAML.

    Raises:
        ValueError: for any other word, a duplicate key, or a value that is not YAML.
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
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key is duplicated", problem_mark=node.start_mark)
        return mapping


# YAML 1.1, which PyYAML reads, has 1e-4 as text, 010 as 8 and 1:30 as 90. These are those of 1.2.
_NUMBERS = {
    "int": r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+",
    "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
for _kind in (_PlainLoader, _PlainDumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in _NUMBERS]
        for first, known in _kind.yaml_implicit_resolvers.items()
    }
    for _name, _pattern in _NUMBERS.items():
        _whole = re.compile(f"(?:{_pattern})$")
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _whole, list("-+.0123456789"))
