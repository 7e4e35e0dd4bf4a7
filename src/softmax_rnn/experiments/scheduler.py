"""Executes a set of runs, several at a time, until all are finished or a stop is requested."""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from softmax_rnn._utils import progress
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn._utils.files import make_writable
from softmax_rnn.experiments.launchers import Job, Launcher, launcher
from softmax_rnn.experiments.plan import PlannedRun, require_trainable
from softmax_rnn.training.run import load_rows
from softmax_rnn.training.stopping import RunStopped, StopRequest

_POLL_SECONDS = 0.5


class RunsFailedError(RuntimeError):
    """Some runs of a set did not finish; the message contains the end of their logs."""


def run_all(
    runs: Sequence[PlannedRun],
    root: Path,
    *,
    parallel: int | None = None,
    cluster: str = "local",
    cluster_options: Mapping[str, Any] | None = None,
    stop_after: float | None = None,
    may_diverge: bool = False,
    console: Console = progress.console,
) -> None:
    """Execute the unfinished runs, each on a GPU or a share of the cores.

    A signal that would stop a run stops all of them; see :func:`softmax_rnn.training.train`.

    Args:
        runs: the runs; each folder may be new, unfinished (the run is resumed) or finished.
        root: common parent of all folders; configurations and logs are written here.
        parallel: runs at a time; by default one per GPU, or one per core; on a cluster, all.
        cluster: ``local``, or ``slurm``: one job per run, through submitit.
        cluster_options: parameters of submitit's executor, such as ``slurm_partition``.
        stop_after: seconds after which the runs stop as if by a signal.
        may_diverge: whether a run that diverges has ended, as one that finishes: it is no error,
            and is not run again.
        console: where progress is shown.

    Raises:
        ValueError: for a variant that cannot be trained, an invalid corpus, or a folder that
            contains a run with another configuration or corpus.
        RunsFailedError: if a run failed; the others were finished first.
        RunStopped: if a signal or the time limit stopped the runs; they can be resumed.
    """

    def over(run: PlannedRun) -> bool:
        return run.folder.finished or (may_diverge and run.folder.diverged)

    waiting = [run for run in runs if not over(run)]
    launch = launcher(cluster, root, max(1, len(waiting)), parallel, cluster_options or {})
    with StopRequest(stop_after) as stop:
        _check(runs)
        if not waiting:
            return
        make_writable(root)
        about = f"{len(waiting)} runs, {len(launch.slots)} at a time, {launch}, in {root}"
        console.print(about, markup=False, soft_wrap=True)  # no markup: a path may contain brackets
        stop.defer()
        ended = _work(waiting, root, launch, stop, console)
        unfinished = [run for run in waiting if not over(run)]
        failed = [
            (run.label(root), job)
            for run in unfinished
            if (job := ended.get(run.folder.path)) and job.poll() != ExitCode.STOPPED
        ]
        if failed and not stop.code:
            ends = (
                f"--- {label}: {_end_text(job.poll())}\n{_log_end(job.log)}"
                for label, job in failed
            )
            raise RunsFailedError(
                f"{len(failed)} of {len(waiting)} runs did not finish.\n" + "\n".join(ends)
            )
        if unfinished:
            raise RunStopped(stop.code, f"with {len(unfinished)} of {len(waiting)} runs unfinished")


def _check(runs: Sequence[PlannedRun]) -> None:
    """Check every attention and corpus, and that no folder contains another run or one in progress.

    Otherwise an error would come only after the runs before it.
    """
    unfinished = {run.config.variant: run for run in runs if not run.folder.finished}
    for run in unfinished.values():
        require_trainable(run.config, run.name)
    manifests: dict[str, dict[str, Any]] = {}
    for run in runs:
        plain = replace(run.config, attention="softmax", layer={}, seed=0)
        conditions = repr(plain)  # the same text for runs of one corpus
        if run.folder.exists:
            run.folder.check_same_config(run.config)
        if conditions not in manifests:
            manifests[conditions] = load_rows(plain)[0].manifest
        if run.folder.exists:
            run.folder.check_same_corpus(manifests[conditions])
        if run.folder.exists and not run.folder.finished:
            with run.folder.locked():
                pass  # a run may still be running after the command that started it was killed


def _work(
    runs: Sequence[PlannedRun], root: Path, launch: Launcher, stop: StopRequest, console: Console
) -> dict[Path, Job]:
    """Run until all are done or a stop is requested; the jobs that ended by themselves."""
    width = max(len(run.label(root)) for run in runs)
    labels = {run.folder.path: run.label(root).ljust(width) for run in runs}
    bars = _bars(console)
    tasks = {
        run.folder.path: bars.add_task(
            labels[run.folder.path], total=run.config.steps, start=False, text="waiting"
        )
        for run in runs
    }
    # Without a terminal, a line per minute with the time left.
    total, before = (sum(x) for x in zip(*map(_steps, runs), strict=True))
    lines = progress.ProgressBar("All runs", total, before, visible=bars.disable)
    waiting, slots = deque(runs), list(launch.slots)
    running: list[tuple[PlannedRun, str | None, Job]] = []
    ended: dict[Path, Job] = {}

    def kill() -> None:
        for _, _, job in running:
            job.kill()

    stop.at_once = kill
    try:
        with bars:
            while (waiting or running) and not stop.code:
                while waiting and slots and not stop.code:
                    run, slot = waiting.popleft(), slots.pop(0)
                    running.append((run, slot, launch.start(run, root, slot)))
                    bars.start_task(tasks[run.folder.path])
                time.sleep(_POLL_SECONDS)
                for entry in list(running):
                    run, slot, job = entry
                    path, code = run.folder.path, job.poll()
                    if code is None:
                        bars.update(tasks[path], **_state(run))
                        continue
                    ended[path] = job
                    running.remove(entry)
                    slots.append(slot)
                    bars.stop_task(tasks[path])
                    bars.update(tasks[path], **{**_state(run), "text": _outcome(run, code)})
                    if bars.disable:  # no terminal: one line per run
                        line = f"{labels[path]}  {_outcome(run, code)}"
                        console.print(line, markup=False, highlight=False, soft_wrap=True)
                lines.update(sum(task.completed for task in bars.tasks))
    finally:  # no run may outlive this call
        for _, _, job in running:
            job.terminate()
        for _, _, job in running:
            job.wait()
    return ended


def _steps(run: PlannedRun) -> tuple[int, int]:
    """All steps of a run, and those that it has done before."""
    return run.config.steps, _state(run)["completed"]


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)),
        console=console,
        speed_estimate_period=60,
        disable=not console.is_terminal,
    )


def _state(run: PlannedRun) -> dict[str, Any]:
    """What a run's progress bar shows, from the last complete row of its metrics."""
    lines = _end_of_file(run.folder.metrics_file, 4096).split("\n")[:-1]
    if not lines:
        return {"completed": 0, "text": "starting"}
    row = json.loads(lines[-1])
    loss = "no update" if row["loss"] is None else f"loss {row['loss']:.3f}"
    if row["step"] == run.config.steps and not run.folder.finished:
        loss += ", last evaluation"  # which takes a while after the last step
    return {"completed": row["step"], "text": loss}


def _outcome(run: PlannedRun, code: int) -> str:
    if not run.folder.finished:
        if run.folder.diverged:
            return "diverged"
        return "stopped" if code == ExitCode.STOPPED else f"failed ({_end_text(code)})"
    summary = run.folder.summary
    return f"{run.config.evaluate_on} loss {summary['test_loss']:.4f} in {summary['seconds']:.0f} s"


def _end_text(code: int | None) -> str:
    assert code is not None
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _log_end(log: Path, size: int = 2000) -> str:
    """The end of a run's output, with only the last state of each progress bar."""
    lines = _end_of_file(log, 2**16).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)[-size:]


def _end_of_file(path: Path, size: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
