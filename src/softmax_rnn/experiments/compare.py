"""Several runs side by side: same blocks, same initial values, only the attention differs."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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

from softmax_rnn._utils.errors import ExitCode
from softmax_rnn._utils.files import make_writable
from softmax_rnn.experiments.launch import Job, Launcher, launcher
from softmax_rnn.experiments.run import PlannedRun, require_different
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.variants import resolve
from softmax_rnn.training.config import RunConfig
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.run import load_blocks
from softmax_rnn.training.stopping import RunStopped, StopRequest

_POLL_SECONDS = 0.5
_STOPPED = ExitCode.STOPPED


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
    require_different(seeds)
    return [
        PlannedRun(
            replace(base, attention=variant, seed=seed),
            RunFolder(root / f"{variant.replace(':', '-')}-seed{seed}"),
        )
        for seed, variant in itertools.product(seeds, variants)
    ]


def run_all(
    runs: Sequence[PlannedRun],
    root: Path,
    *,
    parallel: int | None = None,
    cluster: str = "local",
    cluster_options: Mapping[str, Any] | None = None,
    stop_after: float | None = None,
    console: Console,
) -> None:
    """Run what is not finished, several at a time, each with its share of the cores or a GPU.

    The signals that stop a run stop all of them here; see :func:`softmax_rnn.training.train`.

    Args:
        runs: what to run; every folder may be new, unfinished (it goes on) or finished.
        root: above all folders; their configurations and logs are written here.
        parallel: runs at a time; unless given, one a GPU, or one a core; on a cluster, all.
        cluster: ``local``, or ``slurm``: a job a run, through submitit.
        cluster_options: of submitit's executor, such as ``slurm_partition`` and ``timeout_min``.
        stop_after: seconds after which to stop as by a signal.
        console: where progress is shown.

    Raises:
        ValueError: for an invalid corpus, or a folder that holds a run with another
            configuration or corpus.
        RunsFailedError: if a run failed; the others were finished first.
        RunStopped: if a signal or the time stopped the runs; they can go on.
    """
    waiting = [run for run in runs if not run.folder.finished]
    launch = launcher(cluster, root, max(1, len(waiting)), parallel, cluster_options or {})
    with StopRequest(stop_after) as stop:
        _check(runs)
        if not waiting:
            return
        make_writable(root)
        about = f"{len(waiting)} runs, {len(launch.slots)} at a time, {launch}, in {root}"
        console.print(about, markup=False)  # a path may hold brackets
        stop.defer()
        with _progress(console) as progress:
            ended = _work(waiting, root, launch, stop, progress)
        unfinished = [run for run in waiting if not run.folder.finished]
        failed = {
            run.label(root): job
            for run in unfinished
            if (job := ended.get(run.folder.path)) and job.poll() != _STOPPED
        }
        if failed and not stop.code:
            ends = "\n".join(
                f"--- {label}: {_ended(job.poll())}\n{_last_lines(job.log)}"
                for label, job in failed.items()
            )
            raise RunsFailedError(f"{len(failed)} of {len(waiting)} runs did not finish.\n{ends}")
        if unfinished:
            raise RunStopped(stop.code, f"with {len(unfinished)} of {len(waiting)} runs unfinished")


def _check(runs: Sequence[PlannedRun]) -> None:
    """Every corpus, and that every folder holds the run that is meant, and nobody is at it."""
    manifests: dict[RunConfig, dict[str, Any]] = {}
    for run in runs:
        conditions = replace(run.config, attention="softmax", seed=0)
        if run.folder.exists:
            run.folder.check_same_config(run.config)
        if conditions not in manifests:
            manifests[conditions] = load_blocks(conditions)[0].manifest
        if run.folder.exists:
            run.folder.check_same_corpus(manifests[conditions])
        if run.folder.exists and not run.folder.finished:
            with run.folder.locked():
                pass  # else a run that was left alone is still at it


def _work(
    runs: Sequence[PlannedRun], root: Path, launch: Launcher, stop: StopRequest, progress: Progress
) -> dict[Path, Job]:
    """Keep every slot busy until all runs are done, or a stop is requested.

    However it ends, no run is left running: one that is stopped leaves a folder to go on with.

    Returns:
        The runs that ended by themselves, by their folders.
    """
    width = max(len(run.label(root)) for run in runs)
    bars: dict[Path, TaskID] = {
        run.folder.path: progress.add_task(
            run.label(root).ljust(width), total=run.config.steps, start=False, news="waiting"
        )
        for run in runs
    }
    waiting, slots = deque(runs), list(launch.slots)
    running: list[tuple[PlannedRun, str | None, Job]] = []
    ended: dict[Path, Job] = {}

    def kill() -> None:
        for _, _, started in running:
            started.kill()

    stop.at_once = kill
    try:
        while (waiting or running) and not stop.code:
            while waiting and slots and not stop.code:
                run, slot = waiting.popleft(), slots.pop(0)
                running.append((run, slot, launch.start(run, root, slot)))
                progress.start_task(bars[run.folder.path])
            time.sleep(_POLL_SECONDS)
            for job in list(running):
                run, slot, started = job
                bar, code = bars[run.folder.path], started.poll()
                row = _last_row(run.folder.metrics_file)
                progress.update(bar, completed=row["step"] if row else 0, news=_news(row))
                if code is not None:
                    ended[run.folder.path] = started
                    running.remove(job)
                    slots.append(slot)
                    progress.stop_task(bar)
                    progress.update(bar, news=_outcome(run, code))
                    ending = f"{run.label(root).ljust(width)}  {_outcome(run, code)}"
                    progress.console.print(ending, markup=False)
    finally:
        for _, _, started in running:
            started.terminate()
        for _, _, started in running:
            started.wait()
    return ended


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True)),
        console=console,
        speed_estimate_period=60,
    )


def _news(row: dict[str, Any] | None) -> str:
    if row is None:
        return "starting"
    return "no update" if row["loss"] is None else f"loss {row['loss']:.3f}"


def _outcome(run: PlannedRun, code: int) -> str:
    if not run.folder.finished:
        return f"failed ({_ended(code)})" if code != _STOPPED else "stopped"
    summary = run.folder.summary
    return f"test loss {summary['test_loss']:.4f} in {summary['seconds']:.0f} s"


def _ended(code: int | None) -> str:
    assert code is not None
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_row(path: Path) -> dict[str, Any] | None:
    """The last whole row of a file of rows, without reading it all."""
    lines = _tail(path, 4096).split("\n")[:-1]
    return json.loads(lines[-1]) if lines else None


def _last_lines(log: Path, size: int = 2000) -> str:
    """The end of what a run printed; of a progress bar its last state."""
    lines = _tail(log, 2**16).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)[-size:]


def _tail(path: Path, size: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
