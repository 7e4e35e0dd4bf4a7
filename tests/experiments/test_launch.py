"""Cluster jobs through submitit, with its local executor in place of Slurm."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import submitit
from rich.console import Console

import softmax_rnn.experiments.launchers as launch_module
import softmax_rnn.experiments.scheduler as scheduler
from failing import Fails, fail_in_one
from processes import at_step
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn.experiments.compare import compare_configs
from softmax_rnn.experiments.launchers import ClusterJob, ClusterLauncher, _Training, launcher
from softmax_rnn.experiments.scheduler import RunsFailedError, run_all
from softmax_rnn.training.distributed import OTHER_FAILED
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.stopping import RunStopped
from tiny import tiny


@pytest.fixture(autouse=True)
def _jobs_find_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_runs_as_jobs(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10)
    monkeypatch.setattr(scheduler, "launcher", lambda *_: ClusterLauncher(executor, slots=1))
    root = tmp_path / "runs"
    runs = compare_configs(["norm"], [0], tiny(texts, steps=4), root)
    run_all(runs, root, cluster="slurm", console=console)
    assert all(run.folder.finished for run in runs)
    assert "1 runs, 1 at a time, jobs of LocalExecutor" in console.file.getvalue()


def test_a_job_that_is_stopped_early_is_requeued(texts: Path, tmp_path: Path) -> None:
    work = _Training(tiny(texts, steps=4), tmp_path / "run")
    again = work.checkpoint()
    assert again.function is work  # which resumes: the folder says where


@pytest.mark.slow
def test_a_preempted_job_saves_and_resumes_by_itself(texts: Path, tmp_path: Path) -> None:
    """After submitit's signal there is a checkpoint of the step that was running.

    In the first session the signal comes alone; in the second SIGTERM comes before it.
    """
    config = tiny(texts, steps=200, log_every=1, evaluate_every=200, save_every=200)
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10)
    folder = RunFolder(tmp_path / "run")
    job = executor.submit(_Training(config, folder.path))
    saved: list[int] = []
    for signals in ((signal.SIGUSR2,), (signal.SIGTERM, signal.SIGUSR2)):
        while folder.metrics.empty or folder.metrics.step.max() < max(saved, default=0) + 5:
            assert not job.done(), job.stderr()
            time.sleep(0.1)  # each look costs the run some of its time
        (task,) = psutil.Process(int(job.job_id)).children()
        for number in signals:
            task.send_signal(number)
            while len(folder.checkpoints) == len(saved):
                assert not job.done(), job.stderr()
                time.sleep(0.1)  # it has stopped long before Slurm sends the next
        saved.append(int(folder.checkpoints[-1].name.partition("-")[2]))
    assert job.result() == ExitCode.FINISHED
    assert folder.finished
    starts = [session["start"] for session in folder.environment["sessions"]]
    assert starts == [f"checkpoint-{step}" for step in saved]
    assert 5 <= saved[0] < saved[1] < 200
    assert list(folder.metrics.step) == list(range(1, 201))


@pytest.mark.slow
def test_how_jobs_end_is_told(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped job can be resumed; for a failed job the end of its log is shown."""
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10)
    cluster = ClusterLauncher(executor, slots=2)
    monkeypatch.setattr(scheduler, "launcher", lambda *_: cluster)
    root = tmp_path / "runs"
    bad = compare_configs(["norm"], [0], tiny(texts), root)
    monkeypatch.setattr(launch_module, "_Training", Fails)
    with pytest.raises(RunsFailedError, match=r"(?s)norm-seed0: exit code 1.*the job's own reason"):
        run_all(bad, root, cluster="slurm", console=console)
    stopped = compare_configs(["gate"], [0], tiny(texts), root)
    monkeypatch.setattr(launch_module, "_Training", _Stopped)
    with pytest.raises(RunStopped, match="^Stopped with 1 of 1 runs unfinished"):
        run_all(stopped, root, cluster="slurm", console=console)


@pytest.mark.slow
def test_of_several_processes_the_one_that_failed_is_shown(tmp_path: Path) -> None:
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10, tasks_per_node=2)
    job = ClusterJob(executor.submit(fail_in_one, OTHER_FAILED))
    while job.poll() is None:
        time.sleep(0.05)
    assert job.poll() == ExitCode.FAILED
    assert "the second one's own" in job.log.read_text()


@dataclass
class _Stopped(_Training):
    """A job that gets SIGTERM, and nothing after it."""

    patience: float = 0.0

    def __call__(self) -> int:
        at_step(3, functools.partial(signal.raise_signal, signal.SIGTERM))()
        return super().__call__()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown cluster 'slurn'. Did you mean 'slurm'"):
        launcher("slurn", tmp_path, 1, None, {})
    with pytest.raises(ValueError, match="takes no options; slurm_partition given"):
        launcher("local", tmp_path, 1, None, {"slurm_partition": "gpu"})
    with pytest.raises(ValueError, match="parallel must be at least 1, not 0"):
        launcher("local", tmp_path, 1, 0, {})
    with pytest.raises(ValueError, match="The cluster 'slurm' cannot be used"):
        launcher("slurm", tmp_path, 1, None, {})  # no sbatch here
