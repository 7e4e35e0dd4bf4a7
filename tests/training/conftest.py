"""What the tests of runs in processes of their own share."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import signal
from collections.abc import Iterator

import pytest

from processes import Case, at_step, ended
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.data import load_tokenizer, prepare
from softmax_rnn.training.folder import RunFolder
from tiny import tiny

gc.freeze()  # each training begins with a collection, which need not look at what was imported


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """What a failed test leaves running would keep pytest from ending."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """An undisturbed run."""
    root = tmp_path_factory.mktemp("calm")
    texts = root / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i:02}.txt").write_text(" ".join(str(i * j * j) for j in range(60)) + "\n")
    corpus = prepare(str(texts), load_tokenizer("bytes"), test_fraction=0.2, cache=root).folder
    case = Case(RunFolder(root / "run"), tiny(corpus, attention="norm"), texts)
    stopped = case.session(at_step(7, functools.partial(signal.raise_signal, signal.SIGTERM)))
    assert ended(stopped) == ExitCode.STOPPED, case.log.read_text()
    case.halfway = case.folder.path.rename(root / "halfway")
    assert ended(case.session()) == ExitCode.FINISHED, case.log.read_text()
    return case
