"""What the command line imports, and what it says where packages are missing."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from made_up import made_up
from quick import first_quick
from softmax_rnn.cli.extras import EXTRAS, OF_TRAIN, install_hint
from softmax_rnn.cli.parser import COMMANDS

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
SLOW = ("transformers", "pandas", "scipy", "matplotlib", "datasets", "accelerate", "submitit")
# A process that forks for every line it reads. In the fork a finder comes first that refuses
# packages, as if they were not installed: so none of them may be imported before.
SERVER = """
import importlib, json, os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
words, blocked, folder = json.loads(line)
there = {name.partition(".")[0] for name in sys.modules} & {*blocked}
assert not there, there
os.chdir(folder)
for standard in (1, 2):
    os.dup2(os.open(str(standard), os.O_WRONLY | os.O_CREAT), standard)
sys.meta_path.insert(0, Blocker())
sys.argv = ["softmax-rnn", *words]
from softmax_rnn.cli.main import process
process()
"""
BASE = ("softmax_rnn",)  # and so torch and numpy
# What most commands import; the packages that are imported after these are missing in a test each.
MORE = ("softmax_rnn.cli.parser", "softmax_rnn.training.run", "scipy.stats")
LATE = ("matplotlib", "plotly", "lm_eval", "submitit")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Processes that have imported some modules, once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def server(*modules: str) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            line = [sys.executable, "-c", SERVER, *modules]
            return stack.enter_context(subprocess.Popen(line, **pipes))

        yield server


@pytest.fixture
def command(servers: Callable[..., Any], tmp_path: Path) -> Command:
    """Run a command without some packages: its exit code, output, and errors."""

    def run(words: list[str], blocked: Iterable[str], imported: Sequence[str] = BASE) -> Any:
        server, files = servers(*imported), [tmp_path / number for number in "12"]
        print(json.dumps([words, [*blocked], str(tmp_path)]), file=server.stdin, flush=True)
        return int(server.stdout.readline()), *(file.read_text() for file in files)

    return run


@pytest.mark.parametrize(
    ("words", "code"),
    first_quick(
        [
            (["--help"], 0),
            (["train", "--help"], 0),
            (["compare", "--help"], 0),
            (["reproduce", "--help"], 0),
            (["tarin"], 2),
            (["compare", "--stepz", "3"], 2),
        ]
    ),
)
def test_help_and_mistakes_import_nothing_slow(
    words: list[str], code: int, command: Command
) -> None:
    ended, shown, told = command(words, SLOW)
    assert ended == code, told
    assert shown.startswith("usage:") if code == 0 else "Did you mean" in told


@pytest.mark.parametrize(
    ("words", "extra"),
    [([], "train"), (["--help"], "train"), (["train"], "train"), (["compare", "norm"], "report")],
)
def test_with_the_base_alone_the_extra_is_named(
    words: list[str], extra: str, command: Command
) -> None:
    found = command(words, set(EXTRAS) - {"typing_extensions"})  # torch needs it as well
    assert found[:2] == (2, "")
    told = rf"error: softmax-rnn needs the package '\w+': pip install 'softmax-rnn\[{extra}\]'\.\n"
    assert re.fullmatch(told, found[2]), found[2]


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    first_quick(
        [
            (["compare", "softmax"], "matplotlib", "report"),
            (["compare", "softmax"], "pandas", "report"),  # which brings it: one step, not two
            (["train"], "transformers", "train"),
            (["generate", "runs", "--prompt", "a"], "tokenizers", "train"),
            (["evaluate", "runs", "--tasks", "a"], "lm_eval", "evaluate"),
            (["compare", "softmax", "--cluster", "slurm"], "submitit", "cluster"),
        ]
    ),
)
def test_a_command_names_the_extra_that_it_lacks(
    words: list[str],
    missing: str,
    extra: str,
    tmp_path: Path,
    command: Command,
) -> None:
    made_up(tmp_path / "runs", "norm", 0, 1.5)
    code, _, errors = command(words, {missing}, BASE + MORE * (missing in LATE))
    told = f"error: softmax-rnn {words[0]} needs the package '{missing}': pip install "
    assert errors == f"{told}'softmax-rnn[{extra}]'.\n"
    assert code == 2


def test_the_table_is_that_of_the_package() -> None:
    """Every dependency of an extra that commands need is in the table, under its import name."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    imported = {"huggingface-hub": "huggingface_hub", "pyyaml": "yaml", "scikit-learn": "sklearn"}
    for extra in sorted(set(extras) - {"all", "dev", "docs", "triton"}):
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
