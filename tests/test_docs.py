"""Generated tables in docs equal the output of their scripts; the README's code runs."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["capacity", "recurrent", "scaling"])
def test_tables_equal_the_output_of_their_script(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / f"{name}.py"))["fill"](page) == page


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    assert len(blocks) == 6
    exec("\n".join(blocks), {})


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
