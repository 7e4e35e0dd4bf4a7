"""Start runs as processes on this machine, or as jobs of a Slurm cluster through submitit.

A launcher has slots: a GPU, a share of the cores, or a job of the cluster. It starts a run in one
and returns a job, which the scheduler polls for the run's exit code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from softmax_rnn._utils.errors import ExitCode, require_choice
from softmax_rnn._utils.processes import start
from softmax_rnn.experiments.plan import PlannedRun
from softmax_rnn.training import RunConfig, train
from softmax_rnn.training.distributed import OTHER_FAILED
from softmax_rnn.training.stopping import RunStopped

CLUSTERS = ("local", "slurm")
_IMPORTS = ("softmax_rnn.cli.run_commands", "softmax_rnn.training.run")  # of a run
# By default glibc returns every large block to the system after use; the next use is then slow.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}


class LocalLauncher:
    """One process per run, each with a GPU or a share of the cores.

    Args:
        runs: number of runs.
        parallel: number of slots; by default one per GPU, or one per core.
    """

    def __init__(self, runs: int, parallel: int | None) -> None:
        gpus, cores = _gpus(), _cores()
        workers = min(parallel or len(gpus) or cores, runs)
        self.threads = max(1, cores // workers)
        self.slots = list(itertools.islice(itertools.cycle(gpus or [None]), workers))

    def __str__(self) -> str:
        threads = _environment(self.threads, None)["OMP_NUM_THREADS"]
        return f"{threads} thread{'' if threads == '1' else 's'} each"

    def start(self, run: PlannedRun, root: Path, slot: str | None) -> LocalJob:
        """Start or resume a run in a new process."""
        config, log = run.config_file(root), run.log_file(root)
        for path in (config, log):
            path.parent.mkdir(parents=True, exist_ok=True)
        run.config.save(config)
        words = ["train", "--resume", "--config", str(config), "--out", str(run.folder.path)]
        process = start(
            run_command,
            words,
            log=log,
            environment=_environment(self.threads, slot),
            preload=_IMPORTS,
            fork=slot is None,  # a fork cannot choose its GPU any more
        )
        return LocalJob(process, log)


class ClusterLauncher:
    """One job per run. Jobs that the cluster stops early are requeued; see ``_Training``.

    Args:
        executor: a submitit executor.
        slots: number of jobs at a time.
    """

    def __init__(self, executor: Any, slots: int) -> None:
        self.executor = executor
        self.slots: list[str | None] = [None] * slots

    def __str__(self) -> str:
        return f"jobs of {type(self.executor).__name__}"

    def start(self, run: PlannedRun, root: Path, slot: str | None) -> ClusterJob:
        """Submit one run."""
        return ClusterJob(self.executor.submit(_Training(run.config, run.folder.path.resolve())))


def launcher(
    cluster: str, root: Path, runs: int, parallel: int | None, options: Mapping[str, Any]
) -> Launcher:
    """The launcher for ``local`` or ``slurm``.

    Args:
        cluster: ``local`` or ``slurm``.
        root: folder for the logs of jobs.
        runs: number of runs.
        parallel: number of runs at a time.
        options: parameters of submitit's executor: ``slurm_partition``, ``gpus_per_node``...
    """
    if parallel is not None and parallel < 1:
        raise ValueError(f"parallel must be at least 1, not {parallel}.")
    require_choice("cluster", cluster, CLUSTERS)
    if cluster == "local":
        if options:
            raise ValueError(f"cluster='local' takes no options; {', '.join(options)} given.")
        return LocalLauncher(runs, parallel)
    import submitit  # an optional dependency

    try:
        executor = submitit.AutoExecutor(root / "jobs", cluster=cluster)
        executor.update_parameters(name="softmax-rnn", **options)
    except (NameError, RuntimeError) as error:  # an unknown option; no sbatch on this machine
        raise ValueError(f"The cluster {cluster!r} cannot be used: {error}") from error
    return ClusterLauncher(executor, parallel or runs)


@dataclass
class _Training:
    """The work of a job: submitit calls it, and ``checkpoint`` before the cluster stops it."""

    config: RunConfig
    path: Path
    patience: float = 30.0  # seconds between SIGTERM and the end of a job, on most clusters

    def __call__(self) -> int:
        import submitit

        job = submitit.JobEnvironment()
        if job.num_tasks > 1:
            submitit.helpers.TorchDistributedEnvironment().export()
        try:
            train(self.config, self.path, resume=True)
        except RunStopped as stopped:
            if stopped.code == job._usr_sig():
                signal.raise_signal(stopped.code)  # everything is saved: submitit can requeue
            else:
                time.sleep(self.patience)  # submitit's own signal may follow
            return ExitCode.STOPPED
        return ExitCode.FINISHED

    def checkpoint(self) -> Any:
        """Requeue the same work, which resumes from its newest checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def run_command(words: Sequence[str]) -> None:
    """Be ``softmax-rnn`` with these arguments, and end this process."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = ["softmax-rnn", *words]
    runpy.run_module("softmax_rnn", run_name="__main__", alter_sys=True)


@dataclass
class LocalJob:
    """The process of a run."""

    process: BaseProcess
    log: Path

    def poll(self) -> int | None:
        """The exit code; ``None`` while the run is running."""
        return self.process.exitcode

    def terminate(self) -> None:
        """Request a stop; the run saves a checkpoint."""
        self.process.terminate()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self.process.join()

    def kill(self) -> None:
        """End the process at once, without a checkpoint."""
        pid = self.process.pid
        if pid is not None and self.poll() is None:
            self.process.kill()
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(pid, signal.SIGKILL)  # what it started, too


@dataclass
class ClusterJob:
    """The cluster job of a run, with the methods of :class:`LocalJob`."""

    job: Any
    code: int | None = None

    @property
    def log(self) -> Path:
        """The log; of several processes, that of one which failed first."""
        logs = [Path(self.job.task(i).paths.stderr) for i in range(self.job.num_tasks)]
        own = (log for log in logs if log.exists() and OTHER_FAILED not in log.read_text())
        return next(own, logs[0])

    def poll(self) -> int | None:
        """The exit code; ``None`` while the job is running."""
        if self.code is None and self.job.done():
            try:
                self.code = max(self.job.results())
            except (RuntimeError, OSError):  # the job failed, or was killed, cancelled or lost
                self.code = ExitCode.FAILED
        return self.code

    def terminate(self) -> None:
        """Cancel the job: otherwise it could write to its folder while a resumed run does, too."""
        self.job.cancel(check=False)  # no error: the other jobs must be cancelled as well

    kill = terminate

    def wait(self) -> None:
        """Do nothing: the cluster ends a cancelled job later."""


Job = LocalJob | ClusterJob
Launcher = LocalLauncher | ClusterLauncher


def _gpus() -> list[str]:
    """The visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if named is None else named.split(",")[:count]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(threads: int, gpu: str | None) -> dict[str, str]:
    """The environment of a run's process; it keeps a smaller OMP_NUM_THREADS set by the user."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        threads = min(threads, int(wanted))
    added = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if gpu is not None:
        added["CUDA_VISIBLE_DEVICES"] = gpu
    return {**_KEEP_MEMORY, **os.environ, **added}
