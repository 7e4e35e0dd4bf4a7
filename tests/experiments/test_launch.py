"""Jobs of a cluster, through submitit: its own local executor stands for Slurm."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path

import psutil
import pytest
import submitit
from rich.console import Console

import softmax_rnn.experiments.compare as compare_module
from softmax_rnn.experiments import compare_configs, run_all
from softmax_rnn.experiments.launch import ClusterLauncher, _Training, launcher
from softmax_rnn.training.folder import RunFolder
from tiny import tiny


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_runs_as_jobs(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=2)
    monkeypatch.setattr(compare_module, "launcher", lambda *_: ClusterLauncher(executor, slots=1))
    root = tmp_path / "runs"
    runs = compare_configs(["norm"], [0], tiny(texts, steps=4), root)
    run_all(runs, root, cluster="slurm", console=console)
    assert all(run.folder.finished for run in runs)
    assert "1 runs, 1 at a time, jobs of LocalExecutor" in console.file.getvalue()


def test_a_job_that_is_stopped_early_is_queued_again(texts: Path, tmp_path: Path) -> None:
    work = _Training(tiny(texts, steps=4), tmp_path / "run")
    again = work.checkpoint()
    assert again.function is work  # which resumes: the folder says where


def test_a_job_that_is_preempted_saves_and_goes_on_by_itself(texts: Path, tmp_path: Path) -> None:
    """The signal that submitit has Slurm send: after it there is a checkpoint of that very step."""
    config = tiny(texts, steps=200, log_every=1, evaluate_every=200, save_every=200)
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=2)
    folder = RunFolder(tmp_path / "run")
    job = executor.submit(_Training(config, folder.path))
    while folder.metrics.empty or folder.metrics.step.max() < 5:
        assert not job.done(), job.stderr()
        time.sleep(0.01)
    (task,) = psutil.Process(int(job.job_id)).children()
    task.send_signal(signal.SIGUSR2)
    assert job.result() == str(folder.path)
    assert folder.finished
    (session,) = folder.environment["sessions"]
    assert 5 <= int(session["start"].partition("-")[2]) < 200
    assert list(folder.metrics.step) == list(range(1, 201))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown cluster 'slurn'. Did you mean 'slurm'"):
        launcher("slurn", tmp_path, 1, None, {})
    with pytest.raises(ValueError, match="takes no options; slurm_partition given"):
        launcher("local", tmp_path, 1, None, {"slurm_partition": "gpu"})
    with pytest.raises(ValueError, match="parallel must be at least 1, not 0"):
        launcher("local", tmp_path, 1, 0, {})
    with pytest.raises(ValueError, match="The cluster 'slurm' cannot be used"):
        launcher("slurm", tmp_path, 1, None, {})  # no sbatch here
