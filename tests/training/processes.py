"""Sessions of runs in processes of their own, and what befalls them there."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
from benchmarks.kills import difference, killed, start

from softmax_rnn._utils import processes
from softmax_rnn.training import RunConfig
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.loop import Loop

__all__ = ["difference", "killed", "start"]  # of benchmarks.kills, for all tests


@dataclass
class Case:
    """A run of its own on a corpus of its own.

    Attributes:
        folder: of the run; there is none yet.
        config: of the run.
        texts: what the corpus is made of.
        halfway: folder of a run that stands at step 7, with checkpoints of steps 4 and 7.
    """

    folder: RunFolder
    config: RunConfig
    texts: Path
    halfway: Path = Path()

    @property
    def corpus(self) -> Path:
        return Path(self.config.corpus)

    @property
    def log(self) -> Path:
        return self.folder.path.with_name("log")

    def session(self, before: Callable[[], Any] | None = None, *more: str) -> Any:
        file = self.folder.path.with_name("config.yaml")
        self.config.save(file)
        words = ["train", "--resume", "--config", str(file), "--out", str(self.folder.path), *more]
        return start(words, self.log, before=before)

    def newest(self, name: str) -> Path:
        """A file of the newest checkpoint."""
        return self.folder.checkpoints[-1] / name


def program(code: str, folder: Path) -> Any:
    """A process that runs this code, in place of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    return processes.start(exec, code, {}, log=folder / "log", environment=os.environ, preload=[])


def half(case: Case) -> None:
    shutil.copytree(case.halfway, case.folder.path)
    case.config.save(case.folder.config_file)


def ended(process: Any) -> int:
    process.join(300)  # on a busy machine all takes its time
    if process.exitcode is None:
        pytest.fail("it hangs")
    return int(process.exitcode)


NO_MOUNT = 77  # exit code where no file system can be mounted
_PRIVATE = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
_BIND, _REMOUNT, _READ_ONLY = 1 << 12, 1 << 5, 1
_NEW_MOUNTS, _NEW_USERS = 0x20000, 0x10000000


def at_step(step: int, *deeds: Callable[[], Any]) -> Callable[[], None]:
    """Deeds for after the gradients of a step, before its update."""
    return functools.partial(_patch, Loop, "gradients", step, deeds)


def at_batch(step: int, *deeds: Callable[[], Any]) -> Callable[[], None]:
    """Deeds for the second test batch after a step."""
    return functools.partial(_patch, Loop, "test_batch", step, deeds)


def _patch(owner: Any, name: str, step: int, deeds: tuple[Callable[[], Any], ...]) -> None:
    original, calls = getattr(owner, name), 0

    def method(self: Any, *args: Any) -> Any:
        nonlocal calls
        result = original(self, *args)
        now = self.step + (name == "gradients")
        calls += now == step
        if now == step and calls == 1:
            for deed in deeds:
                deed()
        return result

    setattr(owner, name, method)


def mount(path: Path, megabytes: int | None) -> Callable[[], None]:
    """In this process alone: a disk of so many MiB at ``path``, or what lies there read-only.

    Returns:
        Keeps what is on the small disk; it goes with the process.
    """
    libc, users = ctypes.CDLL(None, use_errno=True), os.geteuid() != 0
    maps = {"uid_map": f"0 {os.geteuid()} 1", "setgroups": "deny", "gid_map": f"0 {os.getegid()} 1"}
    if libc.unshare(_NEW_MOUNTS | (_NEW_USERS if users else 0)):
        os._exit(NO_MOUNT)
    for name, text in maps.items() if users else ():
        Path("/proc/self", name).write_text(text)
    where = str(path).encode()
    path.mkdir(parents=True, exist_ok=True)
    failed = libc.mount(b"none", b"/", None, _PRIVATE, None)
    if megabytes is None:
        failed |= libc.mount(where, where, None, _BIND, None)
        failed |= libc.mount(None, where, None, _BIND | _REMOUNT | _READ_ONLY, None)
    else:
        failed |= libc.mount(b"tmpfs", where, b"tmpfs", 0, f"size={megabytes}m".encode())
    if failed:
        os._exit(NO_MOUNT)

    def keep() -> None:
        if megabytes is not None:
            kept = path.with_name("kept")
            shutil.copytree(path, kept, ignore=shutil.ignore_patterns("filler"))
            libc.umount2(where, 2)
            shutil.copytree(kept, path, dirs_exist_ok=True)

    return keep


def fill(path: Path, kilobytes: int) -> None:
    """Leave so much of a disk."""
    left = shutil.disk_usage(path).free - kilobytes * 1024
    (path / "filler").write_bytes(bytes(left))


def kill() -> None:
    """This process, without a warning."""
    os.kill(os.getpid(), signal.SIGKILL)
