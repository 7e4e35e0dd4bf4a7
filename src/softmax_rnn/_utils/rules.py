"""Plain data that comes from outside: YAML, and what a field must be, in words and as a test."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


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
