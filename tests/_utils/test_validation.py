"""Plain data checked by types: errors name the file, the field, what is allowed and given."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from softmax_rnn._utils.validation import (
    Count,
    Hash,
    NonNegative,
    Number,
    Positive,
    PositiveInt,
    Seed,
    Text,
    validated,
)


class Item(TypedDict):
    size: PositiveInt


class Data(TypedDict):
    name: Text
    kind: Literal["a", "b"]
    limit: PositiveInt | None
    items: Annotated[list[Item], Field(min_length=1)]


VALID: dict[str, Any] = {"name": "x", "kind": "a", "limit": None, "items": [{"size": 1}]}


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [0, 2**53 - 1], [-1, 2**53, 1.0, True, "1", None]),
        (PositiveInt, [1], [0, 1.5, False]),
        (Seed, [0, 2**32 - 1], [-1, 2**32]),
        (Number, [-1.5, 0, 1e99], [float("nan"), float("inf"), 1e100, 10**400, True, "1"]),
        (NonNegative, [0, 0.0], [-1e-9, None]),
        (Positive, [1e-9], [0, 0.0]),
        (Text, ["", "é\n"], [1, b"x", None]),
        (Hash, ["0123456789abcdef" * 4], ["0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", 0]),
    ],
)
def test_types(kind: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert validated(kind, value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^data\.json: it must .*, not "):
            validated(kind, value, "data.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"other": 1}, None),
        ({"name": 5}, "f.json: name must be a valid string, not 5."),
        ({"kind": "c"}, "f.json: Unknown kind 'c'. Allowed: a, b."),
        ({"limit": 0}, "f.json: limit must be greater than or equal to 1, not 0."),
        ({"items": []}, "f.json: items must have at least 1 item, not []."),
        ({"items": {}}, "f.json: items must be a valid list, not {}."),
        ({"items": [{"size": 1}, {}]}, "f.json: items[1].size is missing."),
        ({"items": [{"size": 1}, 2]}, "f.json: items[1] must be a valid dictionary, not 2."),
    ],
)
def test_messages(change: dict[str, Any], message: str | None) -> None:
    data = {**VALID, **change}
    if message is None:
        assert validated(Data, data, "f.json")["items"] == [{"size": 1}]
        return
    with pytest.raises(ValueError) as caught:
        validated(Data, data, "f.json")
    assert str(caught.value) == message
    assert type(caught.value) is ValueError


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ValueError, match=r"^it must be a valid integer, not 'x{199}\.\.\.\.$"):
        validated(Count, "x" * 5000)


def test_without_data() -> None:
    with pytest.raises(ValueError, match="it must be a valid dictionary, not None"):
        validated(Data, None)
