"""Several runs side by side: same blocks, same initial values, only the attention differs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from softmax_rnn.spec import AttentionSpec
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.run import load_blocks
from softmax_rnn.variants import resolve

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class PlannedRun:
    """A run to make: its configuration and its folder."""

    config: RunConfig
    folder: RunFolder

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name


class RunsFailedError(RuntimeError):
    """Some runs of a set did not finish; the message holds the end of their logs."""


def compare_configs(
    variants: Sequence[str], seeds: Sequence[int], base: RunConfig, root: Path
) -> list[PlannedRun]:
    """One run per variant and seed, all else as in ``base``, in folders below ``root``.

    Raises:
        ValueError: for an unknown variant, or a variant or seed given twice.
    """
    names: dict[AttentionSpec, str] = {}
    for name in variants:
        spec = resolve(name)
        if spec in names:
            raise ValueError(f"A variant is named twice: {names[spec]!r} and {name!r} are one.")
        names[spec] = name
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"A seed is given twice: {', '.join(map(str, seeds))}.")
    return [
        PlannedRun(
            replace(base, attention=variant, seed=seed),
            RunFolder(root / f"{variant.replace(':', '-')}-seed{seed}"),
        )
        for seed, variant in itertools.product(seeds, variants)
    ]


def run_all(
    runs: Sequence[PlannedRun], root: Path, *, parallel: int | None = None, console: Console
) -> None:
    """Run what is not finished, several at a time, each with its share of the cores or a GPU.

    Args:
        runs: what to run; every folder may be new, unfinished (it goes on) or finished.
        root: above all folders; their configurations and logs are written here.
        parallel: runs at a time; unless given, one a GPU, or one a core.
        console: where progress is shown.

    Raises:
        ValueError: for a corpus that will not do, or a folder that holds a run with another
            configuration or corpus.
        RunsFailedError: if a run failed; the others were finished first.
    """
    if parallel is not None and parallel < 1:
        raise ValueError(f"parallel must be at least 1, not {parallel}.")
    manifests: dict[RunConfig, dict[str, Any]] = {}
    for run in runs:
        conditions = replace(run.config, attention="softmax", seed=0)
        if run.folder.exists:
            run.folder.check_same_config(run.config)
        if conditions not in manifests:
            manifests[conditions] = load_blocks(conditions)[0].manifest
        if run.folder.exists:
            run.folder.check_same_corpus(manifests[conditions])
    waiting = [run for run in runs if not run.folder.finished]
    if not waiting:
        return
    gpus, cores = _gpus(), _cores()
    workers = min(parallel or len(gpus) or cores, len(waiting))
    threads = max(1, cores // workers)
    slots = list(itertools.islice(itertools.cycle(gpus or [None]), workers))
    console.print(f"{len(waiting)} runs, {workers} at a time, {threads} threads each, in {root}")
    with _progress(console) as progress:
        _work(waiting, root, slots, threads, progress)
    failed = [run for run in waiting if not run.folder.finished]
    if failed:
        logs = "\n".join(f"--- {_label(run, root)}\n{_tail(_log(run, root))}" for run in failed)
        raise RunsFailedError(f"{len(failed)} of {len(waiting)} runs did not finish.\n{logs}")


def _gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them: those that it leaves, if it is set."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if named is None else named.split(",")[:count]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _work(
    runs: Sequence[PlannedRun],
    root: Path,
    slots: list[str | None],
    threads: int,
    progress: Progress,
) -> None:
    """Keep every slot (a GPU, or a share of the cores) busy until all runs are done.

    However it ends, no run is left running: one that is stopped leaves a folder to go on with.
    """
    width = max(len(_label(run, root)) for run in runs)
    bars: dict[Path, TaskID] = {
        run.folder.path: progress.add_task(
            _label(run, root).ljust(width), total=run.config.steps, start=False, news="waiting"
        )
        for run in runs
    }
    waiting, running = deque(runs), list[tuple[PlannedRun, str | None, subprocess.Popen[bytes]]]()
    try:
        while waiting or running:
            while waiting and slots:
                run, slot = waiting.popleft(), slots.pop(0)
                running.append((run, slot, _launch(run, root, threads, slot)))
                progress.start_task(bars[run.folder.path])
            time.sleep(_POLL_SECONDS)
            for job in list(running):
                run, slot, process = job
                bar, done = bars[run.folder.path], process.poll() is not None
                row = _last_row(run.folder.metrics_file)
                news = f"loss {row['loss']:.3f}" if row else "starting"
                progress.update(bar, completed=row["step"] if row else 0, news=news)
                if done:
                    running.remove(job)
                    slots.append(slot)
                    progress.stop_task(bar)
                    progress.update(bar, news=_outcome(run))
                    progress.console.print(f"{_label(run, root).ljust(width)}  {_outcome(run)}")
    finally:
        for _, _, process in running:
            process.terminate()
        for _, _, process in running:
            process.wait()


def _launch(run: PlannedRun, root: Path, threads: int, gpu: str | None) -> subprocess.Popen[bytes]:
    """Start one configuration in a process of its own."""
    config = root / "configs" / f"{_label(run, root)}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    run.config.save(config)
    log = _log(run, root)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "softmax_rnn", "train", "--resume"]
    with log.open("a") as output:
        return subprocess.Popen(
            [*command, "--config", str(config), "--out", str(run.folder.path)],
            env=_environment(threads, gpu),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _environment(threads: int, gpu: str | None) -> dict[str, str]:
    """The environment of a run's process; threads that the user limits stay limited."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        threads = min(threads, int(wanted))
    added = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if gpu is not None:
        added["CUDA_VISIBLE_DEVICES"] = gpu
    return {**os.environ, **added}


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True)),
        console=console,
        speed_estimate_period=60,
    )


def _outcome(run: PlannedRun) -> str:
    if not run.folder.finished:
        return "failed"
    summary = run.folder.summary
    return f"test loss {summary['test_loss']:.4f} in {summary['seconds']:.0f} s"


def _last_row(path: Path) -> dict[str, float] | None:
    """The last whole row of a file of rows, without reading it all."""
    lines = _tail(path, 4096).split("\n")[:-1]
    return json.loads(lines[-1]) if lines else None


def _log(run: PlannedRun, root: Path) -> Path:
    return root / "logs" / f"{_label(run, root)}.log"


def _label(run: PlannedRun, root: Path) -> str:
    """What tells the run from all others below ``root``."""
    return run.folder.path.relative_to(root).as_posix()


def _tail(path: Path, size: int = 2000) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
