"""What the Markdown pages say of the repository is there: targets of links, commands, options."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jupytext
import pytest
from jsonargparse import Namespace
from markdown_it import MarkdownIt
from markdown_it.token import Token

from softmax_rnn._utils.plain_yaml import parse_fields
from softmax_rnn.cli.command import run_config
from softmax_rnn.cli.convert_command import parse_layers
from softmax_rnn.cli.parser import COMMANDS, parse
from softmax_rnn.conversion.stages import Conversion
from softmax_rnn.experiments.compare import compare_configs
from softmax_rnn.experiments.figures import FIGURES
from softmax_rnn.experiments.reproduce import figure_runs
from softmax_rnn.experiments.scales import SCALES
from softmax_rnn.experiments.sweep import Sweep

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


# How a page names what the reader puts there.
PLACEHOLDER = re.compile(r"[A-Z]+|my_\w+")


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Every command line of a page, and whether it is a whole one, in a block."""
    for token in tokens(text):
        whole = token.type == "fence" and token.info == "bash"
        if whole or token.type in {"code_block", "code_inline"}:
            for line in token.content.replace("\\\n", " ").splitlines():
                words = line.split()
                if whole or (len(words) > 1 and program(words) in PROGRAMS):
                    yield line.strip(), whole


def program(words: list[str]) -> str:
    """The name of a command without its folder, and without variables before it."""
    named = [word for word in words if not re.match(r"[A-Z_]+=", word)] or [""]
    return named[0].removeprefix(".venv/bin/")


def fault(line: str, whole: bool = True) -> str:
    """Why a command line cannot be run here, or nothing.

    Of a part of a line, in a sentence, only what is said must be right: more may be required.
    """
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if not words:
        return ""
    name = program(words)
    if name not in PROGRAMS:
        return f"no program {name!r}"
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            PROGRAMS[name](words[1:])
    except SystemExit as ended:
        if ended.code and (whole or "required" not in told.getvalue()):
            return told.getvalue()
    except (ValueError, KeyError, ImportError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _softmax_rnn(words: list[str]) -> None:
    # "..." stands for an option's value, or for further words.
    given = [
        "any" if word == "..." and before.startswith("--") else word
        for before, word in pairwise(["", *words])
    ]
    given = [word for word in given if word != "..."]
    if words[:1] and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise ValueError(f"no command {words[0]!r}")
    command, parsed = parse(["1" if word == "N" else word for word in given])
    if not any(PLACEHOLDER.fullmatch(word) for word in words):
        SETTINGS.get(command, lambda _: None)(parsed)


def _compare(parsed: Namespace) -> None:
    compare_configs(parsed.variants, parsed.seeds, run_config(parsed), Path(parsed.out))


def _reproduce(parsed: Namespace) -> None:
    figure, fields = FIGURES[parsed.figure], parse_fields(parsed.fields)
    figure_runs(figure, SCALES[parsed.scale], Path(parsed.out), parsed.seeds, fields)
    if parsed.sweep:
        Sweep.parse(parsed.sweep)


def _convert(parsed: Namespace) -> None:
    layers, _ = parse_layers(parsed.layers)
    Conversion.of(
        parsed.source,
        Path(parsed.out),
        parsed.attention,
        parsed.corpus,
        fields={"layers": layers, **parse_fields(parsed.with_fields)},
        transfer=parse_fields(parsed.transfer_fields),
        finetune=parse_fields(parsed.finetune_fields),
    )


# What a command makes of its options before it begins to work.
SETTINGS: dict[str, Callable[[Namespace], Any]] = {
    "train": run_config,
    "compare": _compare,
    "reproduce": _reproduce,
    "convert": _convert,
}


class _Parsed(Exception):  # noqa: N818 -- no error
    """The options of a script were read."""


def _python(words: list[str]) -> None:
    if words[:1] != ["-m"]:
        if not (ROOT / words[0]).is_file():
            raise ValueError(f"no file {words[0]}")
        return
    if words[1] == "softmax_rnn":
        _softmax_rnn(words[2:])
        return
    module = importlib.import_module(words[1])
    with pytest.MonkeyPatch.context() as patch:
        read = argparse.ArgumentParser.parse_args

        def parsed(self: argparse.ArgumentParser, *_: object) -> None:
            read(self, words[2:])
            raise _Parsed

        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        with contextlib.suppress(_Parsed):
            module.main()


def _torchrun(words: list[str]) -> None:
    _python(words[words.index("-m") :])


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):(?!=)", text, flags=re.M)
    for word in words:
        name, equals, _ = word.partition("=")
        if not (re.search(rf"\$\({name}[):]", text) if equals else name in targets):
            raise ValueError(f"no target or variable {name!r}")


def _pip(words: list[str]) -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        if found := re.fullmatch(r"(?:\.|softmax-rnn)\[(.*)\]", word):
            for extra in set(found[1].split(",")) - set(about["optional-dependencies"]):
                raise ValueError(f"no extra {extra!r}")


def _as_processor(words: list[str]) -> None:
    if f"{words[0]})" not in (ROOT / "tests" / "as_processor").read_text(encoding="utf-8"):
        raise ValueError(f"no processor {words[0]!r}")
    PROGRAMS[words[1]](words[2:])


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "softmax-rnn": _softmax_rnn,
    "python": _python,
    "torchrun": _torchrun,
    "make": _make,
    "pip": _pip,
    "tests/as_processor": _as_processor,
}


# The changes name commands of earlier versions.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in {"CHANGELOG.md", "tour.ipynb"}],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_of_a_page_are_understood(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their options are parsed, and settings made of them; files they write first are written."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    writes = r"^(?:mkdir [^\n]*|printf [^\n]*|cat > \S+ <<'END'\n.*?^END)$"
    for part in re.findall(writes, text, flags=re.M | re.S):
        subprocess.run(["sh", "-c", part], check=True)
    rest = re.sub(writes, "", text, flags=re.M | re.S)
    assert not {line: told for line, whole in commands(rest) if (told := fault(line, whole))}


@pytest.mark.parametrize(
    "line",
    [
        "softmax-rnn compar softmax",
        "softmax-rnn compare softmax --steeps 20",
        "softmax-rnn compare softmax sofmax",
        "softmax-rnn compare softmax --packing rows",
        "softmax-rnn compare softmax mine=none.yaml",
        "softmax-rnn train --block-size many",
        "softmax-rnn reproduce figure44",
        "softmax-rnn reproduce figure4 --scale huge",
        "softmax-rnn reproduce figure4 --with stepps=20",
        "softmax-rnn convert MODEL --windows 3",
        "softmax-rnn convert hf:a/b --attention window_stat:64",
        "softmax-rnn generate runs/taylor",  # without a prompt
        "torchrun --nproc-per-node 4 -m softmax_rnn train --contxt-parallel 4",
        "python -m benchmarks.opp",
        "python -m benchmarks.op --lenghts 512",
        "python -m benchmarks.decode --rounds many",
        "python docs/nothing.py",
        "make demos",
        "make fuzz SECOND=600",
        "TEST_THREADS=4 make tests",
        "tests/as_processor x86-64-v9 make test",
        "pip install '.[reports]'",
        "softmaxrnn doctor",
    ],
)
def test_a_command_with_a_fault_is_found(line: str) -> None:
    assert fault(line)
    text = f"# Page\n\n```bash\n.venv/bin/softmax-rnn doctor \\\n    --json  # fine\n{line}\n```\n"
    assert [found for found, whole in commands(text) if fault(found, whole)] == [line]
