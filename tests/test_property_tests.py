"""How property tests are run: what a failure says can be pasted, and repeats it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FAULTY = """
import math
import pytest
from dataclasses import dataclass
from hypothesis import example, given, reproduce_failure
from hypothesis import strategies as st

@dataclass
class Pair:
    first: float
    names: tuple[str, ...]

PAIRS = st.builds(Pair, st.floats(), st.lists(st.text()).map(tuple))

@pytest.fixture
def most():
    return 2.0**70

{above}
@given(pair=PAIRS)
def test_pairs(pair, most):
    assert not pair.first > most

{below}
@given(data=st.data())
def test_drawn_inside(data):
    assert data.draw(st.integers(0, 10**6)) < 990_000
"""


def run(folder: Path, *words: str, above: str = "", below: str = "") -> str:
    """What pytest says of a file of two property tests that fail for few examples."""
    (folder / "test_faulty.py").write_text(FAULTY.format(above=above, below=below))
    line = [sys.executable, "-m", "pytest", "-p", "properties", "-p", "no:cacheprovider", *words]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    ended = subprocess.run(
        [*line, f"--rootdir={folder}", "test_faulty.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout


@pytest.mark.slow
def test_a_failure_found_by_fuzzing_can_be_pasted(tmp_path: Path) -> None:
    first = run(tmp_path, "--fuzz", "100", "-k", "pairs")
    seed, example = re.search(r"# SEED=(\d+) .*\n(@example\(pair=Pair\(.*\))\n", first).groups()
    assert int(re.search(r"^Seed (\d+)", first)[1]) <= int(seed)
    again = run(tmp_path, "--fuzz", "100", f"--hypothesis-seed={seed}", "-k", "pairs")
    assert example in again
    assert "1 failed" in again.splitlines()[-1]  # in the first round
    assert "1 failed" in run(tmp_path, "-k", "pairs", above=example)
    blob = re.search(r"@reproduce_failure\(.*\)", run(tmp_path, "--fuzz", "100", "-k", "inside"))
    assert "1 failed" in run(tmp_path, "-k", "inside", below=blob[0])
