import pytest

from softmax_rnn.report.markdown import fill, table

PAGE = "# A page\n\n<!-- a -->\nold\n<!-- end -->\n\ntext\n\n<!-- b -->\n<!-- end -->\n"


def test_parts_are_made_anew_and_the_rest_stays() -> None:
    filled = fill(PAGE, {"a": r"\1 | new", "b": "more\nlines"})
    assert "old" not in filled
    assert (
        "<!-- a -->\n\\1 | new\n<!-- end -->\n\ntext\n\n<!-- b -->\nmore\nlines\n<!-- end -->"
        in filled
    )
    assert fill(filled, {"a": r"\1 | new", "b": "more\nlines"}) == filled


def test_a_part_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places for the part 'c'"):
        fill(PAGE, {"c": ""})
    with pytest.raises(ValueError, match="2 places for the part 'a'"):
        fill(PAGE + PAGE, {"a": ""})


def test_a_table() -> None:
    assert table(["x", "y"], [["1", "2"]]) == "| x | y |\n| --- | ---: |\n| 1 | 2 |"
