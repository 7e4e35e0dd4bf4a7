"""The errors for unknown names."""

from __future__ import annotations

import pytest

import softmax_rnn as sr
from softmax_rnn._utils.errors import unknown

FEW = ("dense", "blocked", "chunked")
MANY = ("softmax", "norm", "gate", "taylor:2", "window:64", "window_state:64", *"abcdef")


def test_names_are_listed_unless_one_of_many_is_clearly_meant() -> None:
    assert str(unknown("form", "blokced", FEW)) == (
        "Unknown form 'blokced'. Did you mean 'blocked'? Allowed: dense, blocked, chunked."
    )
    assert "Did you mean 'elu1'?" in str(unknown("map", "elu", ["relu", "elu1", "cosine"]))
    assert str(unknown("name", "nrom", MANY)) == "Unknown name 'nrom'. Did you mean 'norm'?"
    vague = str(unknown("name", "mean", MANY))
    assert vague.endswith("Allowed: " + ", ".join(MANY) + ".")


def test_a_number_is_kept() -> None:
    message = "Unknown name 'windw_state:16'. Did you mean 'window_state:16'?"
    assert str(unknown("name", "windw_state:16", MANY)) == message
    assert "Did you mean 'taylor:7'?" in str(unknown("name", "tayler:7", MANY))
    assert "Did you mean 'gate'?" in str(unknown("name", "gat:7", MANY))
    with pytest.raises(ValueError, match=r"variant 'tailor:3'. Did you mean 'taylor:3'\?$"):
        sr.variant("tailor:3")
