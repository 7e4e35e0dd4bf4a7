"""Plain data as YAML, there and back."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from softmax_rnn._utils.plain_yaml import format_yaml, parse_fields, parse_yaml


@given(st.text())
@example("\x85")
@example("a\u2028b")
@example(" \u2029\n\r\t")
@example("é")
@example("~")
@example("1e5")
def test_any_text_comes_back(text: str) -> None:
    data = {"corpus": text, "more": [text, None, 1.5, True]}
    assert parse_yaml(format_yaml(data), "here") == data


def test_numbers_as_people_write_them() -> None:
    assert parse_yaml("[1e-4, 1E+3, 1.5e3, 2, '1e5']", "here") == [1e-4, 1e3, 1.5e3, 2, "1e5"]
    assert parse_yaml("[-3, 0, 1_000, .5, 2., -.inf, 0x1f]", "here") == [
        *(-3, 0, 1000, 0.5, 2.0, -float("inf"), 31)
    ]
    assert parse_yaml("[010, 1:30, 0o7, 1.2.3]", "here") == ["010", "1:30", "0o7", "1.2.3"]


def test_text_stays_legible() -> None:
    assert format_yaml({"corpus": "/data/Bücher"}) == "corpus: /data/Bücher\n"


@pytest.mark.parametrize(
    "text", ["a: &x 1\nb: *x", "a: 1\na: 2", "a: [", "!!python/name:os.system"]
)
def test_what_is_not_plain_data_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="here is not YAML"):
        parse_yaml(text, "here")


def test_settings_are_words_of_yaml() -> None:
    words = ["steps=200", "attention=taylor:2", "max_tokens=null", "corpus=a=b"]
    fields = {"steps": 200, "attention": "taylor:2", "max_tokens": None, "corpus": "a=b"}
    assert parse_fields(words) == fields


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["steps"], "KEY=VALUE words, not 'steps'"),
        (["steps=1", "steps=2"], "'steps' is given twice"),
        (["steps=["], "The setting 'steps=.' is not YAML"),
    ],
)
def test_what_is_no_setting_is_named(words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_fields(words)
