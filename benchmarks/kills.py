"""Kill a run at random moments, many times: its result must equal that of an uninterrupted run.

    python -m benchmarks.kills --kills 50 --steps 150

One third of the kills happen while the run starts, one third while it trains, and one third while
it saves a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from softmax_rnn._utils import processes
from softmax_rnn._utils.files import write_json
from softmax_rnn._utils.integrity import MANIFEST
from softmax_rnn.cli.main import main as command_line
from softmax_rnn.training import RunConfig
from softmax_rnn.training.folder import RunFolder

# Files of a checkpoint that may differ: they contain speeds, or depend on where the run stopped.
_OTHERWISE = {"metrics.jsonl", "evaluations.jsonl"}
_POLL = 0.001  # seconds


def start(
    words: list[str],
    log: Path,
    *,
    before: Callable[[], Callable[[], object] | None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start the command line in a new process, in which everything is already imported.

    Args:
        words: the arguments, as in a shell.
        log: file for the output of the process.
        before: called in the process first; if it returns a function, that is called at the end.
        environment: variables in addition to those of this process.
    """
    variables = {**os.environ, **(environment or {})}
    imports = ["softmax_rnn.cli.parser", "softmax_rnn.conversion.stages"]
    return processes.start(_work, words, before, log=log, environment=variables, preload=imports)


def _work(words: list[str], before: Callable[[], Callable[[], object] | None] | None) -> None:
    torch.set_num_threads(1)
    after = before() if before else None
    code = command_line(words)
    if after:
        after()
    sys.exit(code)


def training(config: RunConfig, folder: RunFolder) -> BaseProcess:
    """Start or resume a run in a new process."""
    root = folder.path.parent
    file = root / f"{folder.path.name}.yaml"
    config.save(file)
    words = ["train", "--resume", "--config", str(file), "--out", str(folder.path)]
    return start(words, root / f"{folder.path.name}.log")


def killed(config: RunConfig, folder: RunFolder, kills: int, seed: int) -> Counter[str]:
    """Run to the end with this many kills.

    Returns:
        The number of kills of each kind.

    Raises:
        RuntimeError: if a session fails, or the run ends before the last kill.
    """
    draw, fell, started = random.Random(seed), Counter[str](), 1.0
    moments = [kind for _ in range(-(-kills // 3)) for kind in ("starting", "training", "saving")]
    draw.shuffle(moments)
    for number, kind in enumerate(moments[:kills]):
        left = _parts(folder)
        reached = _saving(folder, left) if kind == "saving" else _rows_written(folder)
        process, began = training(config, folder), time.monotonic()
        at_most = draw.uniform(0, started) if kind == "starting" else math.inf
        while process.is_alive() and not reached() and time.monotonic() - began < at_most:
            time.sleep(_POLL)
        if kind != "starting":
            started = time.monotonic() - began
            time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        if process.exitcode != -9:
            raise RuntimeError(
                f"A session ended with {process.exitcode} before it was killed, after "
                f"{number} kills: give more --steps, or see {folder.path}.log."
            )
        fell[kind] += 1
        fell["leaving half a checkpoint"] += bool(_parts(folder) - left)
    process = training(config, folder)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"The last session ended with {process.exitcode}: see {folder.path}.log")
    return fell


def _rows_written(folder: RunFolder) -> Callable[[], bool]:
    """Whether the new process has written metrics of its own."""
    file = folder.metrics_file
    before = file.stat().st_mtime_ns if file.exists() else 0
    rewound = False

    def reached() -> bool:
        nonlocal before, rewound
        now = file.stat().st_mtime_ns if file.exists() else 0
        written, before = now != before, now
        if written and not rewound:  # the first write is the removal of rows after the checkpoint
            rewound, written = True, False
        return written

    return reached


def _saving(folder: RunFolder, left: set[int]) -> Callable[[], bool]:
    """Whether the new process has begun to write a checkpoint."""
    return lambda: bool(_parts(folder) - left)


def _parts(folder: RunFolder) -> set[int]:
    """The change times of incomplete checkpoints."""
    found = set()
    for path in folder.path.glob(".checkpoint-*"):
        with contextlib.suppress(FileNotFoundError):  # complete: it was just renamed
            found.add(path.stat().st_ctime_ns)
    return found


def difference(one: RunFolder, other: RunFolder) -> str:
    """How two finished runs differ, except for speeds; empty if they are equal."""
    found = []
    for name in ("metrics", "evaluations"):
        a, b = (
            getattr(run, name).drop(columns="tokens_per_second", errors="ignore")
            for run in (one, other)
        )
        if not a.equals(b):
            found.append(f"{name}.jsonl")
    if one.events != other.events:
        found.append("events.jsonl")
    if not np.array_equal(one.test_losses, other.test_losses):
        found.append("test_losses.npy")
    names = [[path.name for path in run.checkpoints] for run in (one, other)]
    if names[0] != names[1]:
        return ", ".join([*found, f"checkpoints {names[0]} and {names[1]}"])
    for name in names[0]:
        files = [
            json.loads((run.path / name / MANIFEST).read_text())["files"] for run in (one, other)
        ]
        found += [
            f"{name}/{file}"
            for file in sorted({*files[0], *files[1]} - _OTHERWISE)
            if files[0].get(file) != files[1].get(file)
            and not _same_tensors(*(run.path / name / file for run in (one, other)))
        ]
    return ", ".join(found)


def _same_tensors(*files: Path) -> bool:
    """Whether two safetensors files have equal tensors; the order of their metadata is random."""
    if any(file.suffix != ".safetensors" or not file.exists() for file in files):
        return False
    a, b = map(load_file, files)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def main() -> int:
    """Run the benchmark and print the result; returns 1 if the runs differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=150, help="training steps of the run")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the kills")
    parser.add_argument("--attention", default="norm", help="a variant")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # of locks that the killed held
    config = RunConfig.preset(
        "demo",
        attention=given.attention,
        steps=given.steps,
        log_every=2,
        evaluate_every=50,
        save_every=2,
        test_fraction=0.002,
    )
    with tempfile.TemporaryDirectory() as root:
        undisturbed, disturbed = (RunFolder(Path(root) / name) for name in ("calm", "killed"))
        began = time.monotonic()
        training(config, undisturbed).join()
        calm = time.monotonic() - began
        fell = killed(config, disturbed, given.kills, given.seed)
        found = difference(undisturbed, disturbed)
    result = {
        "kills": given.kills,
        "steps": given.steps,
        "seed": given.seed,
        "fell": dict(fell),
        "seconds_undisturbed": calm,
        "seconds_killed": time.monotonic() - began - calm,
        "differs_in": found,
    }
    print(json.dumps(result, indent=2))
    if given.out:
        write_json(given.out, result)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
