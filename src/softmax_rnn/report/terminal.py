"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table


def terminal_table(
    header: Sequence[str], rows: Iterable[Sequence[str]] = (), left: Sequence[str] = ()
) -> Table:
    """A table with one line per row; the columns named in ``left`` are left-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
