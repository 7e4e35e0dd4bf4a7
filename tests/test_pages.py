"""What the Markdown pages say of the repository is there: the targets of their links."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import jupytext
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "docs" / "tour.ipynb"],
)
MARKDOWN = MarkdownIt("commonmark").enable("table")
# GitHub gives every heading an anchor, the site those of these levels (`myst_heading_anchors`).
ANCHORED = {"h1", "h2", "h3", "h4"}


def text_of(path: Path) -> str:
    """The Markdown of a page or a notebook, with the pages that it includes."""
    if path.suffix == ".ipynb":
        cells = jupytext.read(path).cells
        return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    text = path.read_text(encoding="utf-8")
    return re.sub(
        r"^```\{include\} (\S+\.md)\n.*?^```$",
        lambda found: (path.parent / found[1]).read_text(encoding="utf-8"),
        text,
        flags=re.M | re.S,
    )


def tokens(text: str) -> list[Token]:
    """Blocks, and what is inside of lines."""
    blocks = MARKDOWN.parse(text)
    return [token for block in blocks for token in (block, *(block.children or ()))]


def links(text: str) -> list[str]:
    """The targets of links and pictures that are not on the network."""
    found = (str(token.attrs.get("href", token.attrs.get("src", ""))) for token in tokens(text))
    return [target for target in found if target and not re.match(r"[a-z]+:", target)]


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    flat, found, seen = tokens(text_of(path)), set(), Counter[str]()
    for opening, inline in pairwise(flat):
        if opening.type == "heading_open" and opening.tag in ANCHORED:
            words = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w -]", "", words.strip().lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def broken(text: str, path: Path) -> list[str]:
    """The links of a text at this path that lead nowhere."""
    wrong = []
    for link in links(text):
        name, _, anchor = unquote(link).partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    # What a page includes has its links relative to itself, and is a page of its own.
    text = text_of(page) if page.suffix == ".ipynb" else page.read_text(encoding="utf-8")
    assert not broken(text, page)


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    added = """
[no page](docs/nothing.md) ![no picture](docs/images/nothing.png)
[no anchor](docs/convert.md#nothing) [not here](#nothing) [here](#install) [a page](docs/convert.md)
[a comment in code](docs/convert.md#cost)

[by name]

[by name]: docs/nothing.md#at-all

| a | table |
|---|---|
| [in a cell](src/nothing.py) | `[code](is-none)` |

```bash
# Not a heading
[code](is-none)
```

[not a heading](#not-a-heading)
"""
    assert broken(text + added, ROOT / "README.md") == [
        "docs/nothing.md",
        "docs/images/nothing.png",
        "docs/convert.md#nothing",
        "#nothing",
        "docs/convert.md#cost",
        "docs/nothing.md#at-all",
        "src/nothing.py",
        "#not-a-heading",
    ]
