"""Runs side by side."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from rich.console import Console

import softmax_rnn.experiments.launchers as launch_module
import softmax_rnn.experiments.scheduler as scheduler
import softmax_rnn.training.stopping as stopping
from processes import ended, program, start
from softmax_rnn.experiments.compare import compare_configs
from softmax_rnn.experiments.launchers import LocalJob, LocalLauncher
from softmax_rnn.experiments.plan import PlannedRun
from softmax_rnn.experiments.scheduler import RunsFailedError, run_all
from softmax_rnn.training import RunConfig, train
from softmax_rnn.training.folder import RunFolder
from softmax_rnn.training.run import load_rows
from softmax_rnn.training.stopping import RunStopped
from tiny import tiny


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_runs_differ_in_their_attention_alone(texts: Path, tmp_path: Path) -> None:
    runs = compare_configs(["softmax", "taylor:4"], [0, 5], tiny(texts), tmp_path)
    assert [run.name for run in runs] == [
        "softmax-seed0",
        "taylor-4-seed0",
        "softmax-seed5",
        "taylor-4-seed5",
    ]
    for run in runs:
        fields = run.config.to_dict() | {"attention": "softmax", "seed": 0}
        assert fields == tiny(texts).to_dict()


def test_without_a_terminal_a_line_now_and_then_tells_the_time_left(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler.progress, "_SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(scheduler.progress, "console", console)
    runs = compare_configs(["norm"], [0], tiny(texts, steps=40, log_every=1), tmp_path)
    run_all(runs, tmp_path, console=console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"All runs: \d+%, .* left\n", told)
    assert "All runs: 100%" in told


def test_mistakes_are_named_before_anything_runs(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'norm'"):
        compare_configs(["softmax", "nrom"], [0], tiny(texts), tmp_path)
    with pytest.raises(ValueError, match="are the same variant"):
        compare_configs(["norm", "norm"], [0], tiny(texts), tmp_path)
    with pytest.raises(ValueError, match="'softmax_l2' and 'norm' are the same variant"):
        compare_configs(["softmax_l2", "norm"], [0], tiny(texts), tmp_path)
    with pytest.raises(ValueError, match="seed is given twice: 1, 0, 1"):
        compare_configs(["norm"], [1, 0, 1], tiny(texts), tmp_path)


def test_runs_are_run_once_and_failures_told(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    good = compare_configs(["softmax"], [0], tiny(texts, steps=4), root)
    bad = compare_configs(["norm"], [0], tiny(texts, vocab_size=100, steps=4), root)
    with pytest.raises(RunsFailedError, match="(?s)1 of 2 runs .*norm-seed0.*has 257 ids"):
        run_all([*good, *bad], root, parallel=2, console=console)
    assert good[0].folder.finished
    assert not bad[0].folder.finished
    before = good[0].folder.metrics_file.stat().st_mtime_ns
    run_all(good, root, console=console)
    assert good[0].folder.metrics_file.stat().st_mtime_ns == before
    other = compare_configs(["softmax"], [0], tiny(texts, steps=8), root)
    with pytest.raises(ValueError, match="another configuration .steps: 4 there, 8 now"):
        run_all(other, root, console=console)
    (texts / "00.txt").write_text("other text")
    with pytest.raises(ValueError, match="softmax-seed0 holds a run on other text"):
        run_all(good, root, console=console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "softmax-seed0  test loss" in shown
    assert "failed" in shown


def test_a_run_that_diverged_has_ended_where_that_is_allowed(
    texts: Path, tmp_path: Path, console: Console
) -> None:
    """It is not run again; where it is not allowed, it is, and fails again."""
    runs = compare_configs(["length"], [0], tiny(texts, learning_rate=1e30), tmp_path)
    run_all(runs, tmp_path, may_diverge=True, console=console)
    (folder,) = (run.folder for run in runs)
    assert folder.diverged
    assert not folder.finished
    assert "diverged" in console.file.getvalue()  # type: ignore[attr-defined]
    before = folder.events_file.stat().st_mtime_ns
    run_all(runs, tmp_path, may_diverge=True, console=console)
    assert folder.events_file.stat().st_mtime_ns == before
    with pytest.raises(RunsFailedError, match="(?s)1 of 1 runs .*is (nan|inf)"):
        run_all(runs, tmp_path, console=console)
    assert folder.events_file.stat().st_mtime_ns > before


def test_a_run_that_was_left_alone_is_named(texts: Path, tmp_path: Path, console: Console) -> None:
    """It is still running after its parent was killed, and its folder is locked."""
    root = tmp_path / "runs"
    (run,) = compare_configs(["norm"], [0], tiny(texts), root)
    run.folder.path.mkdir(parents=True)
    manifest = load_rows(run.config)[0].manifest
    run.folder.record_session({}, run.config.variant, manifest)
    run.config.save(run.folder.config_file)
    with (
        run.folder.locked(),
        pytest.raises(ValueError, match=f"norm-seed0 is in use by process {os.getpid()} on"),
    ):
        run_all([run], root, console=console)
    assert not (root / "logs").exists()


def test_a_log_shows_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    bar = "".join(f"\r{done}%" for done in range(5000))
    (tmp_path / "log").write_text(f"first{bar}\nerror: the reason\r\n")
    assert scheduler._log_end(tmp_path / "log") == "4999%\nerror: the reason\n"


def sleepers(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[str, str | None]]:
    """Runs that only sleep; returns what is launched, where: (name, GPU), as it happens."""
    launched: list[tuple[str, str | None]] = []

    def start(self: object, run: PlannedRun, root: Path, gpu: str | None) -> Any:
        launched.append((run.name.partition("-")[0], gpu))
        wait = seconds / 10 if run.name.startswith("gate") else seconds
        return LocalJob(program(f"import time; time.sleep({wait})", root), root / "log")

    monkeypatch.setattr(LocalLauncher, "start", start)
    monkeypatch.setattr(scheduler, "_POLL_SECONDS", 0.01)
    return launched


def test_a_stop_leaves_no_run_behind(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = sleepers(monkeypatch, 600)
    jobs: list[LocalJob] = []
    start = LocalLauncher.start

    def remember(*arguments: Any) -> Any:
        jobs.append(start(*arguments))
        return jobs[-1]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalLauncher, "start", remember)
    monkeypatch.setattr(scheduler.time, "sleep", interrupt)
    runs = compare_configs(["softmax", "norm", "gate"], [0], tiny(texts), tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        run_all(runs, tmp_path / "runs", parallel=2, console=console)
    assert len(launched) == 2  # the queued one was never started
    assert [job.poll() for job in jobs] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_to_the_runs(
    texts: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    launched, jobs = sleepers(monkeypatch, 600), []
    start = LocalLauncher.start

    def remember(*arguments: Any) -> Any:
        jobs.append(start(*arguments))
        return jobs[-1]

    monkeypatch.setattr(LocalLauncher, "start", remember)
    monkeypatch.setattr(scheduler.time, "sleep", lambda _: signal.raise_signal(number))
    runs = compare_configs(["softmax", "norm", "gate"], [0], tiny(texts), tmp_path / "runs")
    told = f"Stopped by {number.name} with 3 of 3 runs unfinished"
    with pytest.raises(RunStopped, match=told):
        run_all(runs, tmp_path / "runs", parallel=2, console=console)
    assert len(launched) == 2
    assert [job.poll() for job in jobs] == [-signal.SIGTERM] * 2


@pytest.mark.slow
def test_the_second_signal_ends_the_runs_at_once(texts: Path, tmp_path: Path) -> None:
    """Even if the runs do not react to the first signal."""
    words = ["compare", "softmax", *_settings(tiny(texts), tmp_path)]
    process = start(words, tmp_path / "log", before=_deaf_runs)
    deaf = tmp_path / "out" / "deaf"
    while process.is_alive() and not deaf.exists():
        time.sleep(0.01)
    assert deaf.exists(), (tmp_path / "log").read_text()
    run = int(deaf.read_text())
    while process.is_alive():
        process.terminate()
        process.join(0.1)
    assert process.exitcode == -signal.SIGTERM, (tmp_path / "log").read_text()
    with contextlib.suppress(psutil.NoSuchProcess):
        for _ in range(30_000):
            if psutil.Process(run).status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.01)
        os.kill(run, signal.SIGKILL)
        pytest.fail("the run goes on")


def _deaf_runs() -> None:
    def start(self: object, run: PlannedRun, root: Path, gpu: str | None) -> Any:
        deaf = "import os, pathlib, signal, time; signal.signal(15, signal.SIG_IGN); " + (
            f"aside = pathlib.Path({str(root)!r}, 'aside'); aside.parent.mkdir(exist_ok=True); "
            "aside.write_text(str(os.getpid())); aside.rename(aside.with_name('deaf')); "
            "time.sleep(600)"
        )
        return LocalJob(program(deaf, root), root / "log")

    LocalLauncher.start = start  # type: ignore[method-assign]
    stopping._AGAIN = 0.05


def test_how_runs_end_is_told(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run can be resumed; a killed or failed run is an error."""
    ends = {
        "norm": "sys.exit(75)",
        "gate": "os.kill(os.getpid(), 9)",
        "detached": "sys.exit(1)",
    }

    def start(self: object, run: PlannedRun, root: Path, gpu: str | None) -> Any:
        end = ends[run.name.partition("-")[0]]
        return LocalJob(program(f"import os, sys; {end}", root), root / "log")

    monkeypatch.setattr(LocalLauncher, "start", start)
    monkeypatch.setattr(scheduler, "_POLL_SECONDS", 0.01)
    runs = compare_configs(list(ends), [0], tiny(texts), tmp_path)
    told = "(?s)2 of 3 .*gate-seed0: killed by SIGKILL.*detached-seed0: exit code 1"
    with pytest.raises(RunsFailedError, match=told):
        run_all(runs, tmp_path, console=console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "norm-seed0      stopped" in shown
    with pytest.raises(RunStopped, match="^Stopped with 1 of 1 runs unfinished"):
        run_all(runs[:1], tmp_path, console=console)


def _settings(config: RunConfig, path: Path) -> list[str]:
    """The options of a comparison."""
    fields = config.to_dict()
    del fields["attention"], fields["seed"]
    (path / "config.yaml").write_text(yaml.safe_dump(fields))
    return ["--config", str(path / "config.yaml"), "--out", str(path / "out")]


@pytest.mark.slow
@pytest.mark.slow
def test_a_comparison_resumes_after_a_signal(texts: Path, tmp_path: Path) -> None:
    """SIGTERM saves the runs; the resumed runs equal uninterrupted ones."""
    # So many steps that the signal comes before the last one on a busy machine, too.
    config = tiny(texts, steps=400, log_every=1, evaluate_every=400, save_every=400)
    run = RunFolder(tmp_path / "out" / "softmax-seed0")
    process = start(["compare", "softmax", *_settings(config, tmp_path)], tmp_path / "log")
    while process.is_alive() and (run.metrics.empty or run.metrics.step.max() < 5):
        time.sleep(0.1)  # each look costs the run some of its time
    process.terminate()
    code, told = ended(process), (tmp_path / "log").read_text()
    assert code == 75, told
    assert (
        "Stopped by SIGTERM with 1 of 1 runs unfinished; rerun the same command to resume" in told
    )
    (saved,) = run.checkpoints
    assert int(saved.name.partition("-")[2]) == run.metrics.step.max() < 400
    assert "Stopped by SIGTERM after step" in (tmp_path / "out/logs/softmax-seed0.log").read_text()
    expected = train(config, tmp_path / "undisturbed")
    again = train(config, run.path, resume=True)
    assert again.metrics.loss.equals(expected.metrics.loss)
    assert again.summary["test_loss"] == expected.summary["test_loss"]


def test_a_free_gpu_takes_the_next_run(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only GPUs in CUDA_VISIBLE_DEVICES are used; the GPU of the quickest run is free first."""
    launched = sleepers(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ["softmax", "gate", "norm"]
    runs = compare_configs(names, [0], tiny(texts), tmp_path / "runs")
    with pytest.raises(RunsFailedError):
        run_all(runs, tmp_path / "runs", console=console)
    assert launched == [("softmax", "3"), ("gate", "GPU-7"), ("norm", "GPU-7")]


def test_folders_of_one_name_and_other_conditions_are_runs_of_their_own(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = sleepers(monkeypatch, 0)
    runs = [
        PlannedRun(tiny(texts, block_size=size), RunFolder(tmp_path / where / "softmax-seed0"))
        for where, size in (("short", 16), ("long", 64))
    ]
    with pytest.raises(RunsFailedError, match="(?s)2 of 2 .*short/softmax-seed0.*long/softmax-see"):
        run_all(runs, tmp_path, console=console)
    assert len(launched) == 2
    runs.append(PlannedRun(tiny(texts, block_size=5000), RunFolder(tmp_path / "longer")))
    with pytest.raises(ValueError, match="fewer than one block of 5000"):
        run_all(runs, tmp_path, console=console)
    assert len(launched) == 2


def test_a_corpus_too_short_is_told_before_anything_runs(
    texts: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = sleepers(monkeypatch, 0)
    runs = compare_configs(["softmax"], [0], tiny(texts, block_size=5000), tmp_path / "runs")
    with pytest.raises(ValueError, match="The test split .* fewer than one block of 5000"):
        run_all(runs, tmp_path / "runs", console=console)
    assert not launched


def test_the_users_threads_and_other_systems_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, given in (("2", "2"), ("8", "4"), ("", "4"), ("many", "4")):
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        assert launch_module._environment(4, None)["OMP_NUM_THREADS"] == given
    monkeypatch.delattr(launch_module.os, "sched_getaffinity")
    monkeypatch.setattr(launch_module.os, "cpu_count", lambda: 6)
    assert launch_module._cores() == 6


def test_a_file_needs_a_name() -> None:
    with pytest.raises(ValueError, match="'mine.yaml' needs a name: for example mine=mine.yaml"):
        compare_configs(["softmax", "mine.yaml"], [0], RunConfig.preset("demo"), Path("runs"))
    with pytest.raises(ValueError, match="is a file: give its fields as `attention:`"):
        RunConfig.preset("demo", attention="mine.yaml")
