"""The options of the command convert."""

from __future__ import annotations

import pytest

from softmax_rnn.cli.convert_command import parse_layers


def test_layers_of_a_text() -> None:
    assert parse_layers("0,2,4-7") == [0, 2, 4, 5, 6, 7]
    for text in ("", "a", "3-", "-3", "1,,2", "4-x"):
        with pytest.raises(ValueError, match="numbers and ranges"):
            parse_layers(text)
    with pytest.raises(ValueError, match="names a layer twice"):
        parse_layers("1,0-2")
