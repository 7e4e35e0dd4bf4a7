"""What the tests of data share."""

from __future__ import annotations

import pytest

import softmax_rnn.data.preparation as preparation
import softmax_rnn.data.tokenise as tokenise


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few documents, and no corpus is small: a large corpus in miniature."""
    monkeypatch.setattr(tokenise, "_CHARACTERS", 500)
    monkeypatch.setattr(preparation, "_SMALL", 2000)
