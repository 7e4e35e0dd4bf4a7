"""Generated tables in docs equal the output of their scripts; the pages' code runs."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import runpy
import warnings
from importlib.metadata import version
from pathlib import Path

import jupytext
import matplotlib as mpl
import pytest
import torch

import softmax_rnn
from softmax_rnn.ops import reference, variants

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["capacity", "recurrent", "scaling"])
def test_tables_equal_the_output_of_their_script(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / f"{name}.py"))["fill"](page) == page


def test_tables_of_readme_are_those_of_the_measurements() -> None:
    script = runpy.run_path(str(DOCS / "readme.py"))
    for path in script["PAGES"]:
        assert script["fill"](path) == path.read_text(encoding="utf-8"), "python docs/readme.py"


def test_every_number_of_readme_is_that_of_a_file() -> None:
    script = runpy.run_path(str(DOCS / "readme.py"))
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert not script["unchecked"](readme)
    for old, new in (  # each is a fault
        ("2.7 GB", "2.8 GB"),
        ("2.6 and 3.1 million", "2.6 and 4.1 million"),
        ("95% intervals", "90% intervals"),
        ("year    = {2025}", "year    = {2026}"),
        ("some minutes more", "6 minutes"),
        ("None is about large models.", "It is 1.5 times faster. None is about a million."),
    ):
        assert readme.count(old) == 1
        assert script["unchecked"](readme.replace(old, new)), new


def test_readme_is_short() -> None:
    assert (DOCS.parent / "README.md").read_text(encoding="utf-8").count("\n") <= 150


PAGES = sorted([DOCS.parent / "README.md", DOCS / "start.md", *DOCS.glob("howto/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "_REGISTERED", {})  # what a page registers is its own
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    exec("\n".join(blocks), {})


def test_the_tour_has_the_outputs_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is compared; pictures differ by fonts, and must only be there."""
    monkeypatch.chdir(DOCS)
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = jupytext.read(DOCS / "tour.ipynb")
    source = jupytext.read(DOCS / "tour.py")
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ], "make tour"
    names: dict[str, object] = {}
    with torch.random.fork_rng(), mpl.rc_context():
        try:
            for cell in (each for each in notebook.cells if each.cell_type == "code"):
                written = io.StringIO()
                assert all(output.get("name") != "stderr" for output in cell.outputs)
                with contextlib.redirect_stdout(written), warnings.catch_warnings():
                    warnings.simplefilter("error")
                    exec(cell.source, names)
                assert written.getvalue() == "".join(
                    output.text for output in cell.outputs if output.output_type == "stream"
                )
                images = [
                    output for output in cell.outputs if "image/png" in output.get("data", ())
                ]
                assert len(images) == cell.source.count("plt.show()")
        finally:
            torch.set_default_dtype(torch.float32)


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("reference/*.rst"))
    shown = set(re.findall(r"^\.\. auto\w+:: softmax_rnn\.(\w+)$", pages, flags=re.M))
    assert shown == {*softmax_rnn.__all__} - {"__version__"}


def test_every_numbered_equation_is_beside_its_code() -> None:
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## Equation (\d+):.*?\n(.*?)(?=^## )", page, flags=re.M | re.S)
    assert [int(number) for number, _ in parts] == list(range(1, 9))
    assert all("```math" in part and ":pyobject:" in part for _, part in parts)
    for number, part in parts[:7]:  # 8 is 7 as an inner product
        name = re.findall(r"^:pyobject: (\w+)$", part, flags=re.M)[-1]
        about = inspect.getdoc(getattr(reference, name)) or ""
        assert re.search(rf"[Ee]quations? (?:\d and )?{number}\b", about), name
    shown = re.findall(r"^:pyobject: (\w+)$", page, flags=re.M)
    functions = inspect.getmembers(reference, inspect.isfunction)
    assert sorted([*shown, "identity"]) == sorted(
        name for name, each in functions if each.__module__ == reference.__name__
    )


FAMILIES = runpy.run_path(str(DOCS / "families.py"))


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_the_page_of_families_has_every_class(kind: str) -> None:
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    part = page.partition(f"<!-- {kind} -->")[2].partition("<!-- end -->")[0]
    if f"transformers {version('transformers')}:" not in part:
        pytest.skip("the page is of another version of transformers")
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", part, flags=re.M)
    assert rows == [(key, name) for _, key, name in FAMILIES["classes"](kind)]
    assert FAMILIES["FAILS"] not in part


@pytest.mark.parametrize(
    "model_type",
    # a hybrid, a window that is not given to the attention, a compressor, a bias, an indexer
    ["qwen3_next", "phimoe", "deepseek_v4", "doge", "deepseek_v32", "roc_bert"],
)
def test_rows_of_families_equal_those_of_a_run(model_type: str) -> None:
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    (chosen,) = (each for each in FAMILIES["classes"]("causal") if each[1] == model_type)
    assert "| " + " | ".join(FAMILIES["row"](*chosen)) + " |" in page
