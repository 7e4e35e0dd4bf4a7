"""What the command line imports, and what it says where packages are missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from made_up import made_up
from softmax_rnn.cli.extras import EXTRAS, OF_TRAIN, install_hint
from softmax_rnn.cli.parser import COMMANDS

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
SLOW = ("transformers", "pandas", "scipy", "matplotlib", "datasets", "accelerate", "submitit")
# A finder that comes first and refuses packages, as if they were not installed.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv = ["softmax-rnn", *{words!r}]
from softmax_rnn.cli.main import process
process()
"""


def command(words: list[str], blocked: set[str]) -> subprocess.CompletedProcess[str]:
    code = BLOCKER.format(words=words, blocked=sorted(blocked))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["compare", "--help"], 0),
        (["reproduce", "--help"], 0),
        (["tarin"], 2),
        (["compare", "--stepz", "3"], 2),
    ],
)
def test_help_and_mistakes_import_nothing_slow(words: list[str], code: int) -> None:
    ended = command(words, set(SLOW))
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.startswith("usage:") if code == 0 else "Did you mean" in ended.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [([], "train"), (["--help"], "train"), (["train"], "train"), (["compare", "norm"], "report")],
)
def test_with_the_base_alone_the_extra_is_named(words: list[str], extra: str) -> None:
    ended = command(words, set(EXTRAS) - {"typing_extensions"})  # torch needs it as well
    assert (ended.returncode, ended.stdout) == (2, "")
    told = rf"error: softmax-rnn needs the package '\w+': pip install 'softmax-rnn\[{extra}\]'\.\n"
    assert re.fullmatch(told, ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [
        (["compare", "softmax"], "matplotlib", "report"),
        (["compare", "softmax"], "pandas", "report"),  # which brings it: one step, not two
        (["reproduce", "figure4", "--dry-run"], "scipy", "report"),
        (["report", "runs"], "plotly", "report"),
        (["claims", "runs"], "jinja2", "report"),
        (["analyze", "runs/norm-0"], "matplotlib", "report"),
        (["train"], "transformers", "train"),
        (["generate", "runs", "--prompt", "a"], "tokenizers", "train"),
        (["evaluate", "runs", "--tasks", "a"], "lm_eval", "evaluate"),
        (["compare", "softmax", "--cluster", "slurm"], "submitit", "cluster"),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(
    words: list[str],
    missing: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path("src").resolve()))
    monkeypatch.chdir(tmp_path)
    made_up(tmp_path / "runs", "norm", 0, 1.5)
    ended = command(words, {missing})
    told = f"error: softmax-rnn {words[0]} needs the package '{missing}': pip install "
    assert ended.stderr == f"{told}'softmax-rnn[{extra}]'.\n"
    assert ended.returncode == 2


def test_the_table_is_that_of_the_package() -> None:
    """Every dependency of an extra is in the table, under its import name."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    imported = {"huggingface-hub": "huggingface_hub", "pyyaml": "yaml"}
    for extra in sorted(set(extras) - {"all", "dev", "triton"}):
        for line in extras[extra]:
            name = re.match(r"[\w-]+", line)[0]  # type: ignore[index]
            if name != "softmax-rnn":
                expected = "train" if extra == "hf" else extra
                assert EXTRAS[imported.get(name, name)] == expected, line


def test_the_commands_of_the_smaller_extra_are_listed() -> None:
    assert {name for name, command in COMMANDS.items() if command.extra == "train"} == {*OF_TRAIN}


def test_other_modules_are_no_extras() -> None:
    error = ModuleNotFoundError("No module named 'softmax_rnn.typo'", name="softmax_rnn.typo")
    assert install_hint(error, "softmax-rnn", "train") is None
