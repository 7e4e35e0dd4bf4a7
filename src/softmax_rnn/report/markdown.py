"""Markdown pages with generated parts between ``<!-- name -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def fill(page: str, parts: Mapping[str, str]) -> str:
    """The page with the named parts replaced.

    Raises:
        ValueError: if the page contains the markers of a part never, or more than once.
    """
    for name, part in parts.items():
        found = re.findall(rf"<!-- {re.escape(name)} -->\n.*?<!-- end -->", page, flags=re.DOTALL)
        if len(found) != 1:
            raise ValueError(f"The page has {len(found)} places for the part {name!r}, not one.")
        page = page.replace(found[0], f"<!-- {name} -->\n{part}\n<!-- end -->")
    return page


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the first ``left`` columns are left-aligned, the others right-aligned."""
    ruler = ["---" if place < left else "---:" for place in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ruler, *rows))
