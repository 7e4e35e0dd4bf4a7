"""Markdown pages with parts made by a script, between ``<!-- name -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def fill(page: str, parts: Mapping[str, str]) -> str:
    """The page with the named parts made anew.

    Raises:
        ValueError: if the page has no place for one of them, or two.
    """
    for name, part in parts.items():
        whole = f"<!-- {name} -->\n{part}\n<!-- end -->"
        places = re.findall(rf"<!-- {re.escape(name)} -->\n.*?<!-- end -->", page, flags=re.DOTALL)
        if len(places) != 1:
            raise ValueError(f"The page has {len(places)} places for the part {name!r}, not one.")
        page = page.replace(places[0], whole)
    return page


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table: the first ``left`` columns to the left, the others to the right."""
    ruler = ["---" if place < left else "---:" for place in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ruler, *rows))
