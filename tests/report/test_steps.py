"""Final losses minus softmax's, a row for each variant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from made_up import made_up
from softmax_rnn.report.grid import Column
from softmax_rnn.report.steps import draw_steps

NAMES = ("softmax", "gate", "taylor:2", "norm")  # not in the order of the variants
LOSSES = dict(zip(NAMES, (1.0, 1.3, 0.9, 1.0), strict=True))


@pytest.mark.parametrize("seeds", [1, 3])
def test_rows_are_in_the_order_of_the_panel(seeds: int, tmp_path: Path) -> None:
    runs = [
        made_up(tmp_path, name, seed, loss + 0.1 * seed)
        for seed in range(seeds)
        for name, loss in LOSSES.items()
    ]
    stem = tmp_path / "steps"
    paths = draw_steps([Column("first", runs), Column("second", runs[:1])], "Steps", stem)
    assert [path.suffix for path in paths] == [".png", ".svg"]
    words = stem.with_suffix(".svg").read_text()
    texts = re.findall(r">([^<>]+)</text>", words)
    shown = [name for name in texts if name in NAMES]
    assert shown == ["gate", "taylor:2", "norm", "softmax"]
    told = [float(text) for text in texts if re.fullmatch(r"[+-]\d\.\d{3}", text)]
    assert told == pytest.approx([0.3, -0.1, 0.0], abs=0.02)
    assert "first" in words
    assert "second" not in words  # has softmax alone
    assert ("one seed" in words) == (seeds == 1)


def test_nothing_is_drawn_without_softmax(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, name, 0, 1.0) for name in NAMES[1:]]
    assert draw_steps([Column("", runs)], "Steps", tmp_path / "steps") == []
