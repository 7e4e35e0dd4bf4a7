"""Several runs side by side: same blocks, same initial values, only the attention differs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

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

from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.run import load_corpus

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
    variants: Sequence[str], seeds: Iterable[int], base: RunConfig, root: Path
) -> list[PlannedRun]:
    """One run per variant and seed, all else as in ``base``, in folders below ``root``.

    Raises:
        ValueError: for an unknown variant, or one named twice.
    """
    if len(set(variants)) < len(variants):
        raise ValueError(f"A variant is named twice: {', '.join(variants)}.")
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
        root: where their configurations and logs are written.
        parallel: runs at a time; unless given, one a GPU, or one a core.
        console: where progress is shown.

    Raises:
        ValueError: if a folder holds a run with another configuration.
        RunsFailedError: if a run failed; the others were finished first.
    """
    for run in runs:
        if run.folder.exists:
            run.folder.check_same_config(run.config)
    waiting = [run for run in runs if not run.folder.finished]
    if not waiting:
        return
    load_corpus(waiting[0].config)
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    workers = min(parallel or gpus or cores, len(waiting))
    threads = max(1, cores // workers)
    devices = itertools.cycle(range(gpus)) if gpus else itertools.repeat(None)
    console.print(f"{len(waiting)} runs, {workers} at a time, {threads} threads each, in {root}")
    with ThreadPoolExecutor(workers) as pool, _progress(console) as progress:
        jobs = {
            run.name: pool.submit(_launch, run, root, threads, device)
            for run, device in zip(waiting, devices, strict=False)
        }
        _watch(waiting, jobs, progress)
    failed = [run for run in waiting if not run.folder.finished]
    if failed:
        logs = "\n".join(f"--- {run.name}\n{_tail(_log(run, root))}" for run in failed)
        raise RunsFailedError(f"{len(failed)} of {len(waiting)} runs did not finish.\n{logs}")


def _launch(run: PlannedRun, root: Path, threads: int, device: int | None) -> int:
    """Run one configuration in a process of its own; return its exit code."""
    config = root / "configs" / f"{run.name}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    run.config.save(config)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    log = _log(run, root)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "softmax_rnn", "train", "--resume"]
    with log.open("a") as output:
        return subprocess.run(
            [*command, "--config", str(config), "--out", str(run.folder.path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


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


def _watch(runs: Sequence[PlannedRun], jobs: dict[str, Future[int]], progress: Progress) -> None:
    """Show every run's steps until all jobs are done."""
    width = max(len(run.name) for run in runs)
    bars: dict[str, TaskID] = {
        run.name: progress.add_task(
            run.name.ljust(width), total=run.config.steps, start=False, news="waiting"
        )
        for run in runs
    }
    shown_done: set[str] = set()
    while len(shown_done) < len(runs):
        time.sleep(_POLL_SECONDS)
        for run in runs:
            bar, job = bars[run.name], jobs[run.name]
            if run.name in shown_done or not (job.running() or job.done()):
                continue
            progress.start_task(bar)
            if row := _last_row(run.folder.metrics_file):
                news = f"loss {row['loss']:.3f}"
                progress.update(bar, completed=row["step"], news=news)
            else:
                progress.update(bar, news="starting")
            if job.done():
                shown_done.add(run.name)
                progress.stop_task(bar)
                progress.update(bar, news=_outcome(run))
                progress.console.print(f"{run.name.ljust(width)}  {_outcome(run)}")


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
    return root / "logs" / f"{run.name}.log"


def _tail(path: Path, size: int = 2000) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
