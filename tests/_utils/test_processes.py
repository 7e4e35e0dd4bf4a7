"""Processes that have imported everything: what they inherit, what they survive."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from processes import ended
from quick import first_quick
from softmax_rnn._utils import processes

TELL = "import os, sys; print(os.getsid(0) == os.getpid(), 'torch' in sys.modules, flush=True)"


def run(code: str, log: Path, *, fork: bool = True, **variables: str) -> BaseProcess:
    environment = {**os.environ, **variables}
    return processes.start(
        exec, code, {}, log=log, environment=environment, preload=["torch"], fork=fork
    )


@pytest.mark.parametrize("fork", first_quick([True, False]))
def test_its_output_its_variables_and_its_exit_code(fork: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "import os, sys; print(os.environ['WORD'], file=sys.stderr); os.system('echo below'); "
    process = run(f"{code}sys.exit(75)", log, fork=fork, WORD="mine")
    assert ended(process) == 75
    assert sorted(log.read_text().split()) == ["before", "below", "mine"]
    assert "WORD" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_a_fork_leads_a_session_and_has_imported_what_it_needs(tmp_path: Path) -> None:
    ended(run(TELL, tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "True True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_signals_end_the_process_but_not_the_server(tmp_path: Path) -> None:
    """As they reach a whole job: the exit codes must still be told, and the next run start."""
    log = tmp_path / "log"
    code = "import signal, sys\n"
    code += "signal.signal(15, lambda *_: sys.exit(75)); print('ready', flush=True); signal.pause()"
    process = run(code, log)
    while process.is_alive() and (not log.exists() or not log.read_text()):
        process.join(0.01)
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        server.send_signal(number)
    process.terminate()
    assert ended(process) == 75
    assert ended(run("import sys; sys.exit(3)", log)) == 3
    assert server.is_running()
