"""Several processes: on one folder by mistake, of one run, and one after the other, killed."""

from __future__ import annotations

import functools
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import Case, at_step, difference, ended, kill, killed, start
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.training.folder import RunFolder

FINISHED, FAILED, WRONG, STOPPED, _ = ExitCode


def test_two_processes_on_one_folder(calm: Case, tmp_path: Path) -> None:
    """The second is refused and harms nothing; what a killed one held is free."""
    case = replace(calm, folder=RunFolder(tmp_path / "run"))
    signs = tmp_path / "here", tmp_path / "go"
    first = case.session(at_step(7, functools.partial(_wait, *signs)))
    while first.is_alive() and not signs[0].exists():
        time.sleep(0.01)
    try:
        code, told = ended(case.session()), case.log.read_text()
    finally:
        signs[1].touch()
    assert code == WRONG
    assert re.search(r"run is in use by process \d+ on .*: wait for it", told)
    assert ended(first) == FINISHED
    assert not difference(calm.folder, case.folder)


def _wait(here: Path, go: Path) -> None:
    here.touch()
    while not go.exists():
        time.sleep(0.01)


def two(case: Case, before: Callable[[], Any] | None = None, rank: int = 1) -> list[int]:
    """Two processes of one run, as torchrun starts them; something befalls one of them."""
    case.config.save(file := case.folder.path.with_name("config.yaml"))
    words = ["train", "--resume", "--config", str(file), "--out", str(case.folder.path)]
    return pair(words, case.log, before, rank)


def pair(
    words: list[str], log: Path, before: Callable[[], Any] | None = None, rank: int = 1
) -> list[int]:
    """Two processes of one command."""
    # Below the ports of outgoing connections: until it is used, nobody else is given it.
    port = str(10_000 + os.getpid() % 20_000)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = [
        start(
            words,
            log,
            before=before if each == rank else None,
            environment={**address, "RANK": str(each), "LOCAL_RANK": str(each)},
        )
        for each in range(2)
    ]
    return [ended(process) for process in both]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would want two GPUs")
def test_processes_of_one_run_stop_together(calm: Case, tmp_path: Path) -> None:
    """A signal that one of them gets stops both after the same step, and nothing is lost."""
    cases = [replace(calm, folder=RunFolder(tmp_path / str(i) / "run")) for i in range(3)]
    for case in cases:
        case.folder.path.parent.mkdir()
    assert two(cases[0]) == [FINISHED] * 2
    stop = at_step(7, functools.partial(signal.raise_signal, signal.SIGTERM))
    assert two(cases[1], stop) == [STOPPED] * 2
    assert cases[1].folder.checkpoints[-1].name == "checkpoint-7"
    assert two(cases[2], at_step(7, kill)) == [FAILED, -signal.SIGKILL]
    told = cases[2].log.read_text()
    assert re.search("error: Another process of this run ended, .*checkpoint-4; --resume", told)
    assert "Traceback" not in told
    for case in cases[1:]:
        assert two(case) == [FINISHED] * 2, case.log.read_text()
        assert not difference(cases[0].folder, case.folder)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would want two GPUs")
@pytest.mark.parametrize(
    ("rank", "sharded"), [(0, False), (1, False), (1, True)], ids=["first", "second", "sharded"]
)
def test_what_fails_in_one_process_fails_in_all(
    calm: Case, tmp_path: Path, rank: int, sharded: bool
) -> None:
    """The first alone writes weights; each writes its random numbers."""
    config = replace(calm.config, fsdp=sharded)
    case = replace(calm, folder=RunFolder(tmp_path / "run"), config=config)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (10_000, 10_000))
    assert two(case, at_step(7, limit), rank) == [FAILED] * 2
    told = case.log.read_text()
    assert "checkpoint-8 could not be written: " in told
    assert "error: Another process of this run failed; it reports why." in told
    assert "Traceback" not in told
    assert two(case) == [FINISHED] * 2
    assert not list(case.folder.path.glob(".*"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would want two GPUs")
def test_a_folder_in_use_is_told_to_all_processes(calm: Case, tmp_path: Path) -> None:
    """Only the first of them looks."""
    case = replace(calm, folder=RunFolder(tmp_path / "run"))
    case.folder.path.mkdir()
    with case.folder.locked():
        assert sorted(two(case)) == [FAILED, WRONG]
    told = case.log.read_text()
    assert "run is in use by process" in told
    assert "error: Another process of this run failed; it reports why." in told


@pytest.mark.slow
def test_kills_at_random_moments(calm: Case, tmp_path: Path) -> None:
    """The script of benchmarks, small."""
    config = replace(calm.config, steps=160, save_every=8, evaluate_every=80)
    undisturbed = replace(calm, folder=RunFolder(tmp_path / "calm"), config=config)
    assert ended(undisturbed.session()) == FINISHED
    folder = RunFolder(tmp_path / "run")
    fell = killed(config, folder, kills=3, seed=0)
    assert sum(fell[kind] for kind in ("starting", "training", "saving")) == 3
    assert not difference(undisturbed.folder, folder)
