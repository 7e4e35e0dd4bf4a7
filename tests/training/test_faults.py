"""What can go wrong in two days: each fault is made, told, and survived.

The table says what is told, how the command ends, and whether the run goes on: to the very weights
and rows of an undisturbed run.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import softmax_rnn.data.preparation as preparation
import softmax_rnn.data.tokenise as tokenise
import softmax_rnn.training.stopping as stopping
from processes import NO_MOUNT, Case, at_batch, at_step, difference, ended, fill, half, kill, mount
from quick import first_quick
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.loop import Loop

FINISHED, FAILED, WRONG, STOPPED, _ = ExitCode


@dataclass(frozen=True)
class Fault:
    """What happens, and what is to come of it.

    Attributes:
        told: pattern of what is printed.
        code: exit code.
        prepare: what is done to the run beforehand.
        before: what is done in the session's process.
        options: of its command line.
        mend: what a person then does; the run goes on.
        lost: pattern of the reason why it does not go on.
    """

    told: str
    code: int
    prepare: Callable[[Case], None] = lambda case: None
    before: Callable[[Case], Callable[[], Any]] = lambda case: _nothing
    options: tuple[str, ...] = ()
    mend: Callable[[Case], None] = lambda case: None
    lost: str = ""


def _nothing() -> None:
    pass


def sent(number: int, where: Callable[..., Callable[[], None]] = at_step, step: int = 7) -> Any:
    """A signal, whatever the process is at."""
    return lambda case: where(step, functools.partial(signal.raise_signal, number))


def sent_twice(case: Case) -> Callable[[], None]:
    return at_step(7, _terminate_twice)


def _terminate_twice() -> None:
    stopping._AGAIN = 0.01
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.02)


def poison(case: Case) -> Callable[[], Any]:
    return _poison


def _poison() -> None:
    """A gradient that is not a number, at step 7."""
    original = Loop.gradients

    def step(self: Any) -> float:
        loss = original(self)
        if self.step == 6:
            next(self.model.parameters()).grad[0] = float("nan")
        return loss

    Loop.gradients = step  # type: ignore[method-assign]


def small_files(case: Case) -> Callable[[], None]:
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000))
    return at_step(7, limit)


def small_disk(step: int, kilobytes: int) -> Callable[[Case], Callable[[], Any]]:
    """A disk on which so much is left from a step on."""
    return lambda case: functools.partial(_small_disk, case.folder.path, step, kilobytes)


def _small_disk(path: Path, step: int, kilobytes: int) -> Callable[[], None]:
    keep = mount(path, 8)
    at_step(step, functools.partial(fill, path, kilobytes))()
    return keep


def file_in_its_place(case: Case) -> None:
    case.folder.path.write_text("mine")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """One bit, in the middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def to_checkpoint(name: str, harm: Callable[[Path], None]) -> Callable[[Case], None]:
    def do(case: Case) -> None:
        half(case)
        harm(case.newest(name))

    return do


def to_all_checkpoints(case: Case) -> None:
    half(case)
    for checkpoint in case.folder.checkpoints:
        flip(checkpoint / "model.safetensors")


def to_shard(harm: Callable[[Path], None]) -> Callable[[Case], None]:
    def do(case: Case) -> None:
        half(case)
        shutil.copytree(case.corpus, case.corpus.with_name("whole"))
        harm(case.corpus / "train-00000.bin")

    return do


def to_shard_at_step_7(harm: Callable[[Path], None]) -> dict[str, Any]:
    return {
        "prepare": lambda case: shutil.copytree(case.corpus, case.corpus.with_name("whole")),
        "before": lambda case: at_step(7, functools.partial(harm, case.corpus / "train-00000.bin")),
        "mend": bring_back,
    }


def bring_back(case: Case) -> None:
    shutil.copytree(case.corpus.with_name("whole"), case.corpus, dirs_exist_ok=True)


def from_text(case: Case) -> None:
    case.config = replace(case.config, corpus=str(case.texts))


def die_tokenising(case: Case) -> Callable[[], None]:
    return _die_tokenising


def _die_tokenising() -> None:
    """At the ninth chunk, in one of several threads."""
    tokenise._CHARACTERS, preparation._SMALL = 500, 2000  # type: ignore[misc]
    original, calls = tokenise.Encoder.encode, itertools.count(1)

    def encode(self: Any, *args: Any) -> Any:
        if next(calls) == 9:
            kill()
        return original(self, *args)

    tokenise.Encoder.encode = encode  # type: ignore[method-assign]


def wild_clock(case: Case) -> Callable[[], None]:
    return _wild_clock


def _wild_clock() -> None:
    """Every look at the clock finds another hour, back and forth."""
    honest, looks = time.time, iter(range(10**9))
    time.time = lambda: honest() + 3600 * (-1) ** next(looks)


def old_and_new(case: Case) -> None:
    half(case)
    for checkpoint, year in zip(case.folder.checkpoints, (2090, 1990), strict=True):
        for path in (*checkpoint.iterdir(), checkpoint):
            os.utime(path, ((year - 1970) * 31_557_600,) * 2)


SAVED = r"Stopped by {} after step 7, saved in checkpoint-7; rerun the same command to resume"
UNWRITTEN = r"checkpoint-8 could not be written: .*{}.*B left.*run/checkpoint-4; when there is"
LEFT_OUT = r"checkpoint-7 is left out: {}"
DAMAGED = r"The prepared corpus .* is damaged: train-00000.bin {}"

STATE = "state/shard-00001-model-00001-of-00001.safetensors"

FAULTS = {
    "SIGTERM": Fault(SAVED.format("SIGTERM"), STOPPED, before=sent(signal.SIGTERM)),
    "SIGINT": Fault(SAVED.format("SIGINT"), STOPPED, before=sent(signal.SIGINT)),
    "Slurm's SIGUSR1": Fault(SAVED.format("SIGUSR1"), STOPPED, before=sent(signal.SIGUSR1)),
    "SIGTERM in an evaluation": Fault(
        "Stopped by SIGTERM after step 6, saved in checkpoint-6",
        STOPPED,
        before=sent(signal.SIGTERM, at_batch, 6),
    ),
    "SIGTERM in the last evaluation": Fault(
        "Stopped by SIGTERM after step 12, saved in checkpoint-12",
        STOPPED,
        before=sent(signal.SIGTERM, at_batch, 12),
    ),
    "SIGTERM twice": Fault("", -signal.SIGTERM, before=sent_twice),
    "SIGKILL": Fault("", -signal.SIGKILL, before=lambda case: at_step(7, kill)),
    "time is over": Fault(
        "Stopped by its time limit",
        STOPPED,
        before=lambda case: at_step(7, functools.partial(time.sleep, 1.0)),
        options=("--stop-after", "1s"),
    ),
    "a gradient that is not finite": Fault(
        "The gradient norm of step 7 is nan; the run stopped before the update, with 0 steps "
        "skipped in a row. Last checkpoint: .*checkpoint-4",
        FAILED,
        before=poison,
    ),
    "a learning rate that is too large": Fault(
        "The (loss|gradient norm) of step 2 is (nan|inf).* Last checkpoint: none.*learning.rate",
        FAILED,
        prepare=lambda case: setattr(case, "config", replace(case.config, learning_rate=1e30)),
        lost="of step 2 is (nan|inf)",
    ),
    "files may not grow": Fault(UNWRITTEN.format("File too large"), FAILED, before=small_files),
    "a disk that fills with a checkpoint": Fault(
        UNWRITTEN.format("No space left"), FAILED, before=small_disk(7, 100)
    ),
    "a disk that fills with a row": Fault(
        r"No space left on device: '.*/run/evaluations.jsonl'", FAILED, before=small_disk(5, 0)
    ),
    "a folder that is read-only": Fault(
        r"Nothing can be written in .*run \(Read-only file system\): choose another folder",
        WRONG,
        prepare=half,
        before=lambda case: functools.partial(mount, case.folder.path, None),
    ),
    "a file in the folder's place": Fault(
        r"Nothing can be written in .*run \(File exists\)",
        WRONG,
        prepare=file_in_its_place,
        mend=lambda case: case.folder.path.unlink(),
    ),
    "a checkpoint cut short": Fault(
        LEFT_OUT.format(r"model.safetensors has \d+ bytes, not \d+"),
        FINISHED,
        prepare=to_checkpoint("model.safetensors", cut),
    ),
    "a bit of a checkpoint flipped": Fault(
        LEFT_OUT.format("shard-00001-.*safetensors is not what was written"),
        FINISHED,
        prepare=to_checkpoint(STATE, flip),
    ),
    "a checkpoint without a file": Fault(
        LEFT_OUT.format("progress.json is missing"),
        FINISHED,
        prepare=to_checkpoint("progress.json", Path.unlink),
    ),
    "a checkpoint without manifest": Fault(
        LEFT_OUT.format("manifest.json is missing"),
        FINISHED,
        prepare=to_checkpoint("manifest.json", Path.unlink),
    ),
    "a manifest cut short": Fault(
        LEFT_OUT.format("JSONDecodeError"),
        FINISHED,
        prepare=to_checkpoint("manifest.json", cut),
    ),
    "no whole checkpoint": Fault(
        r"No checkpoint in .*run is intact \(checkpoint-7: .*; checkpoint-4: .*\). Restore one",
        FAILED,
        prepare=to_all_checkpoints,
        lost="No checkpoint in .*run is intact",
    ),
    "a shard cut short": Fault(
        DAMAGED.format(r"has \d+ bytes, not \d+"), WRONG, prepare=to_shard(cut), mend=bring_back
    ),
    "a shard that is missing": Fault(
        DAMAGED.format("is missing"), WRONG, prepare=to_shard(Path.unlink), mend=bring_back
    ),
    "a shard that was changed": Fault(
        DAMAGED.format("is not what was written"), WRONG, prepare=to_shard(flip), mend=bring_back
    ),
    "a shard that is changed meanwhile": Fault(
        DAMAGED.format("is not what was written"), WRONG, **to_shard_at_step_7(flip)
    ),
    "a shard that is cut off meanwhile": Fault(
        "Fatal Python error: Bus error",
        -signal.SIGBUS,
        **to_shard_at_step_7(empty),
    ),
    "killed while the corpus is tokenised": Fault(
        "", -signal.SIGKILL, prepare=from_text, before=die_tokenising
    ),
    "a clock that jumps": Fault("", FINISHED, before=wild_clock),
    "checkpoints of other times": Fault("", FINISHED, prepare=old_and_new),
}


@pytest.mark.parametrize("name", first_quick(FAULTS))
def test_faults_are_told_and_survived(name: str, calm: Case, tmp_path: Path) -> None:
    fault = FAULTS[name]
    corpus = shutil.copytree(calm.corpus, tmp_path / "corpus")
    config = replace(calm.config, corpus=str(corpus))
    case = replace(calm, folder=RunFolder(tmp_path / "run"), config=config)
    fault.prepare(case)
    case.log.unlink(missing_ok=True)
    code = ended(case.session(fault.before(case), *fault.options))
    if code == NO_MOUNT:
        pytest.skip("no file system can be mounted here")
    told = case.log.read_text()
    assert re.search(fault.told, told, re.DOTALL), told
    assert code == fault.code, told
    assert "Traceback" not in told
    fault.mend(case)
    case.log.unlink()
    code = ended(case.session())
    told = case.log.read_text()
    if fault.lost:
        assert re.search(fault.lost, told), told
        assert code != FINISHED
    else:
        assert code == FINISHED, told
        assert not difference(calm.folder, case.folder)
        assert not list(case.folder.path.glob(".*"))
