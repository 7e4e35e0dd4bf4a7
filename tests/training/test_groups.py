"""Groups of processes: a run leaves the one that it joined."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from softmax_rnn.training.distributed import leaving_its_group, require_a_group
from softmax_rnn.training.loop import NonFiniteError
from softmax_rnn.training.stopping import RunStopped


def join(folder: Path) -> None:
    store = distributed.FileStore(str(folder / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("ends", "left"),
    [
        (None, True),
        (RunStopped(15), True),
        (NonFiniteError("nan"), True),
        (ValueError("in all of them"), True),
        (RuntimeError("in a backward pass"), False),  # which others may still be in
        (MemoryError(), False),
    ],
)
def test_a_run_leaves_the_group_it_joined(
    ends: BaseException | None, left: bool, tmp_path: Path
) -> None:
    """With its threads still there the interpreter may end by SIGABRT; leaving may wait for all."""

    @leaving_its_group()
    def run() -> None:
        join(tmp_path)
        if ends is not None:
            raise ends

    if ends is None:
        run()
    else:
        with pytest.raises(type(ends)):
            run()
    assert distributed.is_initialized() != left


def test_a_group_that_was_left_is_kept(tmp_path: Path) -> None:
    """DDP would wait for its threads with Python's lock, which one of them may be waiting for."""
    groups: list[weakref.ref[Any]] = []

    @leaving_its_group()
    def run() -> None:
        join(tmp_path)
        groups.append(weakref.ref(distributed.group.WORLD))

    run()
    gc.collect()
    assert groups[0]() is not None


def test_a_second_run_of_such_a_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with leaving_its_group():
        join(tmp_path)
    with pytest.raises(ValueError, match="can train once: start another torchrun"):
        require_a_group()


def test_a_group_of_the_caller_stays(tmp_path: Path) -> None:
    join(tmp_path)
    with leaving_its_group():
        pass
    assert distributed.is_initialized()
