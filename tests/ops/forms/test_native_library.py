"""The library of the native forms: how it is built, by whom, and what follows if it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn.ops.forms.cpu import cpp

needs_library = pytest.mark.skipif(
    bool(cpp.missing()), reason="needs g++ and SOFTMAX_RNN_CPU_KERNEL other than 0"
)
Forget = Callable[[], None]


def gate(form: str = "auto") -> torch.Tensor:
    """An attention that the native form computes, unless it says otherwise."""
    length = cpp.LEAST_TOKENS
    x = torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(0))
    return sr.attention(x, x, x, "gate", output_gate=torch.ones(1, 2, length), form=form)


def test_without_a_compiler_another_form_computes_and_says_so_once(
    fresh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    assert "native" not in sr.forms("gate")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(gate(), gate("dense"))
    assert [str(x.message).splitlines()[0] for x in caught] == [
        "form='native' cannot be built: there is no g++ on the path."
    ]


@needs_library
def test_a_source_that_does_not_compile_is_no_error(tiny: Path) -> None:
    tiny.write_text("nonsense")
    with pytest.warns(UserWarning, match="cannot be built: .*error: .nonsense. does not"):
        torch.testing.assert_close(gate(), gate("dense"))
    assert "native" not in sr.forms("gate")
    with pytest.raises(OSError, match="cannot be built"):
        cpp.load()


@needs_library
def test_a_compiled_token_needs_no_library(tiny: Path) -> None:
    """If it is the first to ask for one, and the compiler fails."""
    tiny.write_text("nonsense")
    q, k, v = torch.randn(3, 1, 2, 8, 8).unbind(0)
    _, state = sr.attention(q, k, v, "taylor:2", return_state=True)

    def step(x: Tensor) -> Tensor:
        out, _ = sr.attention(x, x, x, "taylor:2", state=state, return_state=True)
        return out

    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.compile(step, backend="eager")(q[:, :, :1])
        torch.testing.assert_close(found, step(q[:, :, :1]))


def test_it_can_be_switched_off(fresh: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpp.VARIABLE, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(gate(), gate("dense"))
    assert "native" not in sr.forms("gate")


@needs_library
def test_a_compiler_that_says_nothing(
    fresh: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\nprintf '\\n\\377' >&2; exit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.warns(UserWarning, match="form='native' cannot be built: "):
        torch.testing.assert_close(gate(), gate("dense"))


@needs_library
def test_every_compiler_has_its_library(
    fresh: Forget, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = shutil.which("g++")
    assert cpp.load().answer() == 42
    (tmp_path / "g++").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 99.0 || exec {compiler} "$@"\n'
    )
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    fresh()
    assert cpp.load().answer() == 42
    assert len([*cpp.folder().glob("*.so")]) == 2


@needs_library
@pytest.mark.parametrize("reason", ["no home", "no folder", "full"])
def test_without_a_cache_it_is_built_for_one_process(
    tiny: Path, reason: str, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    said = {"no home": "SOFTMAX_RNN_CACHE can", "no folder": "Not a directory", "full": "No space"}
    if reason == "no home":
        for name in ("SOFTMAX_RNN_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    elif reason == "no folder":
        monkeypatch.setenv("SOFTMAX_RNN_CACHE", "/dev/null/nothing")
    else:
        output = cpp._output

        def full(command: list[str], folder: Path | None = None) -> str:
            if folder is not None and folder.name == "building":
                message = "fatal error: error writing to x: No space left on device"
                raise subprocess.CalledProcessError(1, command, stderr=message)
            return output(command, folder)

        monkeypatch.setattr(cpp, "_output", full)
    with pytest.warns(UserWarning, match=f"cannot be used: .*{said[reason]}") as caught:
        assert cpp.load().answer() == 42
    assert len(caught) == 1
    assert not any(temporary.iterdir())


@needs_library
def test_one_thread_builds(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds, build = [], cpp._built
    monkeypatch.setattr(cpp, "_built", lambda *x: (builds.append(x), build(*x))[1])
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: cpp.load(), range(8))]
    assert len(builds) == 1
    assert all(library is found[0] for library in found)


def test_a_forked_process_does_not_wait_for_a_thread_that_it_has_not() -> None:
    with cpp._one_thread:
        child = os.fork()
        if not child:
            os._exit(0 if cpp._one_thread.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


PROGRAM = """
import sys
from pathlib import Path
from softmax_rnn.ops.forms.cpu import cpp
cpp.SOURCES, cpp.HEADERS = [Path(sys.argv[1])], []
assert cpp.load().answer() == 42
"""


@needs_library
@pytest.mark.slow
def test_one_process_builds_and_the_next_one_if_it_is_killed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    (log := tmp_path / "log").touch()
    then = f'echo "$*" >> {log}\n'
    (compiler := tmp_path / "g++").write_text(
        f'#!/bin/sh\n{then}case "$*" in *-shared*) [ -e {tmp_path}/killed ] || '
        f"{{ touch {tmp_path}/killed; kill -9 $PPID; exit 1; }} ;; esac\n"
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tiny)]
    assert subprocess.run(command, check=False).returncode == -9
    assert (cpp.folder() / "building").exists()
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len([x for x in log.read_text().splitlines() if "-shared" in x]) == 2
    assert sorted(path.suffix for path in cpp.folder().iterdir()) == [
        "",
        ".so",
    ]  # and the lock
    assert not any(temporary.iterdir())


@needs_library
@pytest.mark.slow
def test_a_library_cut_short_is_built_again(fresh: Forget) -> None:
    """The whole one: its first call would end the process."""
    cpp.load()
    (path,) = cpp.folder().glob("*.so")
    content = path.read_bytes()
    path.unlink()  # this process has loaded it
    path.write_bytes(content[: len(content) // 2])
    path.chmod(0o600)
    fresh()
    with pytest.warns(UserWarning, match=r"\.so is compiled again: it is damaged"):
        torch.testing.assert_close(gate("native"), gate("dense"))


def test_the_sources_are_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["softmax_rnn"]
    package = Path(sr.__file__).parent
    files = {path for pattern in patterns for path in package.glob(pattern)}
    assert len(cpp.SOURCES) == 4
    assert files >= {*cpp.HEADERS, *cpp.SOURCES}
