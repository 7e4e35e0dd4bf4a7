"""A plugin of pytest: what property tests draw, and how a failure of theirs is told."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import pkgutil
import re
import secrets
import sys
import time
from typing import Any

import hypothesis
import pytest

# `make test` draws the same examples each time, so that no test fails by chance; `make fuzz` draws
# others each time. Hypothesis' own limits of time would depend on how busy the machine is.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "fresh", hypothesis.settings.get_profile("same"), derandomize=False, max_examples=100
)
hypothesis.settings.load_profile("same")


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


@pytest.hookimpl(trylast=True)  # Hypothesis' own marks its tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hypothesis also draws constants of modules that are loaded: let it be all of them, always."""
    package = sys.modules.get("softmax_rnn")
    if package and any(item.get_closest_marker("hypothesis") for item in items):
        for module in pkgutil.walk_packages(package.__path__, "softmax_rnn."):
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
            hypothesis.seed(seed)(item.obj)
            item.user_properties[:] = [("seed", seed)]
            another = None if following is item else following  # what it needs as well stays set up
            item.ihook.pytest_runtest_protocol(item=item, nextitem=another)
            if session.testsfailed or time.monotonic() > end:
                return True
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """With the failure of a property test, what to paste above it."""
    report = yield
    notes = getattr(call.excinfo and call.excinfo.value, "__notes__", [])
    if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj) and notes:
        found = "".join(f"# SEED={seed} finds it again\n" for _, seed in item.user_properties)
        text = f"{found}{_decorator(item, notes)}"
        report.sections.append(("The failing example, to paste above the test", text))
    return report


def _decorator(item: pytest.Function, notes: list[str]) -> str:
    """The failing example as ``@example``; where its ``repr`` is no code, as Hypothesis' bytes."""
    text = "\n".join(notes)
    found = re.search(rf"^[\w ]+: {item.originalname}(\(.*?^\))$", text, re.DOTALL | re.MULTILINE)
    with contextlib.suppress(SyntaxError):
        call = ast.parse(f"example{found[1] if found else ''}", mode="eval").body
        if isinstance(call, ast.Call) and "..." not in ast.unparse(call):
            call.keywords = [word for word in call.keywords if word.arg not in item.fixturenames]
            return f"@{ast.unparse(call)}"
    return "".join(re.findall(r"@reproduce_failure\(.*\)", text))
