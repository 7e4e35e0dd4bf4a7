"""Where runs run: processes on this machine, or jobs of a Slurm cluster through submitit.

A launcher has slots (a GPU, a share of the cores, a job of the cluster) and starts a run in one of
them; what it returns is polled for the run's exit code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from softmax_rnn._utils.errors import ExitCode, require_choice
from softmax_rnn.experiments.plan import PlannedRun
from softmax_rnn.training import RunConfig, train
from softmax_rnn.training.distributed import OTHER_FAILED
from softmax_rnn.training.stopping import RunStopped

CLUSTERS = ("local", "slurm")
# glibc would give every large block back after use, and fault its pages in again at the next.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}


class LocalLauncher:
    """One process per run, each with its share of the cores, or a GPU.

    Args:
        runs: how many runs there are to make.
        parallel: slots; by default one per GPU, or one per core.
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
        """Start or resume a run in a process of its own."""
        config, log = run.config_file(root), run.log_file(root)
        for path in (config, log):
            path.parent.mkdir(parents=True, exist_ok=True)
        run.config.save(config)
        command = [sys.executable, "-m", "softmax_rnn", "train", "--resume"]
        with log.open("a") as output:
            process = subprocess.Popen(
                [*command, "--config", str(config), "--out", str(run.folder.path)],
                env=_environment(self.threads, slot),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it once: from the scheduler
            )
        return LocalJob(process, log)


class ClusterLauncher:
    """One job per run. Jobs that the cluster stops early resume; see ``_Training``.

    Args:
        executor: a submitit executor.
        slots: jobs at a time.
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
        cluster: its name.
        root: logs of jobs are kept below it.
        runs: how many runs there are to make.
        parallel: runs at a time.
        options: of submitit's executor: ``slurm_partition``, ``gpus_per_node``, ``timeout_min``...
    """
    if parallel is not None and parallel < 1:
        raise ValueError(f"parallel must be at least 1, not {parallel}.")
    require_choice("cluster", cluster, CLUSTERS)
    if cluster == "local":
        if options:
            raise ValueError(f"cluster='local' takes no options; {', '.join(options)} given.")
        return LocalLauncher(runs, parallel)
    import submitit  # needed on clusters alone

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
    patience: float = 30.0  # seconds from SIGTERM to the end of a job, on most clusters

    def __call__(self) -> int:
        import submitit

        job = submitit.JobEnvironment()
        if job.num_tasks > 1:
            submitit.helpers.TorchDistributedEnvironment().export()
        try:
            train(self.config, self.path, resume=True)
        except RunStopped as stopped:
            if stopped.code == job._usr_sig():
                signal.raise_signal(stopped.code)  # to submitit: it requeues, now that all is saved
            else:
                time.sleep(self.patience)  # that signal may be on its way
            return ExitCode.STOPPED
        return ExitCode.FINISHED

    def checkpoint(self) -> Any:
        """Queue the same work again: it resumes from its newest checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass
class LocalJob:
    """A run's process."""

    process: subprocess.Popen[bytes]
    log: Path

    def poll(self) -> int | None:
        """The exit code; ``None`` while it runs."""
        return self.process.poll()

    def terminate(self) -> None:
        """Ask it to stop; it leaves a folder to resume."""
        self.process.terminate()

    def wait(self) -> None:
        """Wait until it has stopped."""
        self.process.wait()

    def kill(self) -> None:
        """End it at once, saved or not."""
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class ClusterJob:
    """A run's job, with the methods of :class:`LocalJob`."""

    job: Any
    code: int | None = None

    @property
    def log(self) -> Path:
        """Of several processes, the log of one that does not blame another."""
        logs = [Path(self.job.task(i).paths.stderr) for i in range(self.job.num_tasks)]
        own = (log for log in logs if log.exists() and OTHER_FAILED not in log.read_text())
        return next(own, logs[0])

    def poll(self) -> int | None:
        """The exit code; ``None`` while it runs."""
        if self.code is None and self.job.done():
            try:
                self.code = max(self.job.results())  # waits for it, if there is none
            except (RuntimeError, OSError):  # it failed, or was killed, cancelled, lost
                self.code = ExitCode.FAILED
        return self.code

    def terminate(self) -> None:
        """Cancel it: left alone, it would write to its folder while a resumed run does."""
        self.job.cancel(check=False)  # if one cannot be cancelled, the others still are

    kill = terminate

    def wait(self) -> None:
        """Return at once: the cluster ends a cancelled job in its own time."""


Job = LocalJob | ClusterJob
Launcher = LocalLauncher | ClusterLauncher


def _gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them: those that it leaves, if it is set."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if named is None else named.split(",")[:count]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(threads: int, gpu: str | None) -> dict[str, str]:
    """The environment of a run's process; a limit on threads set by the user is kept."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        threads = min(threads, int(wanted))
    added = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if gpu is not None:
        added["CUDA_VISIBLE_DEVICES"] = gpu
    return {**_KEEP_MEMORY, **os.environ, **added}
