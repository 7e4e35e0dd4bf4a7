"""Generated tables in docs equal the output of their scripts; the README's code runs."""

from __future__ import annotations

import re
import runpy
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
