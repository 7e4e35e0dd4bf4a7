"""Fixtures shared by all tests, and what property tests draw."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import random
import re
import secrets
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# For processes that tests start: threads that wait for each other on a busy core cost most of it.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import numpy as np
import pytest
import torch

import softmax_rnn
from softmax_rnn.ops import speeds

# `make test` draws the same examples each time, so that no test fails by chance; `make fuzz` draws
# others each time. Hypothesis' own limits of time would depend on how busy the machine is.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "fresh", hypothesis.settings.get_profile("same"), derandomize=False
)
hypothesis.settings.load_profile("same")

# Tests send these; under nohup the one, in the background of a script the other is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# All tests of a process share one server of forks. Whichever of them starts it, it imports what all
# of them need: if it did not, each of hundreds of forks would import it again.
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "softmax_rnn.analysis.conversion_report",
        "softmax_rnn.cli.parser",
        "softmax_rnn.cli.run_commands",
        "softmax_rnn.experiments.conversion",
        "softmax_rnn.training.run",
    ]
)
BaseContext.set_forkserver_preload = lambda *_: None  # type: ignore[method-assign]

WORDS = ("state", "query", "key", "value", "gate", "norm", "power", "series", "sum", "row")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz",
        type=float,
        metavar="SECONDS",
        help="repeat the chosen property tests for so long, with fresh examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fuzz is not None:
        hypothesis.settings.load_profile("fresh")
        config.option.hypothesis_seed = int(
            config.option.hypothesis_seed or secrets.randbelow(2**32)
        )


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.option.fuzz is not None:
        print(f"Seed {session.config.option.hypothesis_seed}", flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hypothesis also draws constants of modules that are loaded: let it be all of them, always."""
    if any(hypothesis.is_hypothesis_test(getattr(item, "obj", None)) for item in items):
        for module in pkgutil.walk_packages(softmax_rnn.__path__, "softmax_rnn."):
            with contextlib.suppress(ImportError):  # of what is optional
                importlib.import_module(module.name)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With --fuzz: rounds of all tests, each with a seed of its own, until the time is over."""
    if session.config.option.fuzz is None:
        return None
    end = time.monotonic() + session.config.option.fuzz
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    for seed in itertools.count(session.config.option.hypothesis_seed):
        for item, following in itertools.pairwise([*items, items[0]]):
            if time.monotonic() > end:
                return True
            failed = session.testsfailed
            hypothesis.seed(seed)(item.obj)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed > failed:
                return True
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """With the failure of a property test, what repeats it."""
    report = yield
    notes = getattr(call.excinfo and call.excinfo.value, "__notes__", [])
    if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj) and notes:
        report.sections.append(("Paste above the test", _decorator(item, "\n".join(notes))))
    return report


def _decorator(item: pytest.Function, notes: str) -> str:
    """The failing example as ``@example``; where its ``repr`` is no code, Hypothesis' own words."""
    found = re.search(rf"^[\w ]+: {item.originalname}(\(.*?^\))$", notes, re.DOTALL | re.MULTILINE)
    with contextlib.suppress(SyntaxError):
        call = ast.parse(f"example{found[1]}" if found else "").body[0].value
        call.keywords = [word for word in call.keywords if word.arg not in item.fixturenames]
        if not any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(call)):
            return f"@{ast.unparse(call)}"
    return "".join(re.findall(r"@reproduce_failure\(.*\)", notes))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests run beside each other, a core each."""
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """What a test draws depends on no other test."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state is what may be drawn from
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")  # so that fixtures of modules come after it
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv(speeds.VARIABLE, "shipped")  # the same forms on every machine
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN, so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 40 small text files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        words = " ".join(WORDS[(i * j + j * j) % len(WORDS)] for j in range(60))
        (folder / f"{i:02}.txt").write_text(words + "\n")
    return folder


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two prompts, the second one left-padded."""
    ids = torch.randint(0, 61, (2, 23), generator=torch.Generator().manual_seed(0))
    shown = torch.ones_like(ids)
    shown[1, :9] = 0
    return {"input_ids": ids, "attention_mask": shown}
