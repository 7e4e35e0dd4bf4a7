"""Fixtures shared by all tests."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# For processes that tests start: threads that wait for each other on a busy core cost most of it.
os.environ["OMP_NUM_THREADS"] = "1"
# Threads of tests that run beside each other sleep while they wait, rather than take a core.
os.environ["OMP_WAIT_POLICY"] = "passive"

import numpy as np
import pytest
import torch

# Tests send these; under nohup the one, in the background of a script the other is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# All tests of a process share one server of forks. Whichever of them starts it, it imports what all
# of them need: if it did not, each of hundreds of forks would import it again.
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "softmax_rnn.conversion.report",
        "softmax_rnn.cli.parser",
        "softmax_rnn.cli.run_commands",
        "softmax_rnn.conversion.stages",
        "softmax_rnn.training.run",
    ]
)
BaseContext.set_forkserver_preload = lambda *_: None  # type: ignore[method-assign]

pytest_plugins = ["properties"]

WORDS = ("state", "query", "key", "value", "gate", "norm", "power", "series", "sum", "row")


# What takes seconds a test: Triton's interpreter (or compiler), a browser.
SLOW_FIXTURES = {"device", "chromium"}
# Of a sweep of more cases, `make test` runs every other one.
SWEEP = 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests of a file that use such a fixture, all but the first are slow.

    So is every other case of a long sweep.
    """
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(getattr(item, "function", item), []).append(item)
    for sweep in cases.values():
        for item in sweep[1::2] if len(sweep) > SWEEP else ():
            item.add_marker("slow")
    using = [i for i in items if SLOW_FIXTURES.intersection(getattr(i, "fixturenames", ()))]
    first = {item.path: item for item in reversed(using)}
    for item in using:
        if item is not first[item.path]:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests run beside each other, a core each."""
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _own_plans() -> None:
    """What a test changes in the environment or the library decides nothing in the next one."""
    if "softmax_rnn.ops.plan" in sys.modules:
        sys.modules["softmax_rnn.ops.plan"].forget()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """What a test or a fixture draws depends on no other test."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state is what may be drawn from
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")  # so that fixtures of modules come after it
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
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
