"""Write results.csv, figure.png, figure.svg and report.html for a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from softmax_rnn._utils.files import make_writable, write_text
from softmax_rnn.report.check import check_run
from softmax_rnn.report.figure import draw
from softmax_rnn.report.html import Section, page
from softmax_rnn.report.table import results
from softmax_rnn.training.folder import RunFolder


def find_runs(root: Path) -> list[RunFolder]:
    """The finished runs in and below ``root``, sorted by path.

    Raises:
        ValueError: if there is no finished run, or a file of one is damaged.
    """
    if not root.is_dir():
        raise ValueError(f"There is no folder {root}.")
    runs = [RunFolder(path.parent) for path in sorted(root.rglob("summary.json"))]
    if not runs:
        raise ValueError(f"No finished run in {root}.")
    for run in runs:
        check_run(run)
    return runs


def report(runs: Sequence[RunFolder], root: Path) -> tuple[pd.DataFrame, list[Path]]:
    """Write table, figure and page of ``runs`` into ``root``; return the table and the paths."""
    make_writable(root)
    table = results(runs)
    write_text(root / "results.csv", table.to_csv(index=False))
    figures = draw(runs, root)
    write_text(root / "report.html", page([Section("Results", runs, table)], root))
    return table, [root / "results.csv", *figures, root / "report.html"]
