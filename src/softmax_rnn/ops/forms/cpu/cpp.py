"""The compiled ``*.cpp``: built for this CPU at its first use, then loaded from a cache.

The library is built with the machine's g++ for the machine's own instructions
(``-march=native``), so its file name is a hash of the source, the compiler, the CPU's instructions
and PyTorch, whose matrix products it calls. Without a compiler, or with
``SOFTMAX_RNN_CPU_KERNEL=0``, there is no library.

Loading a library executes it. One from the cache is loaded only if no other user can have written
it, and if it ends with the hash of its content: of a file that is cut short, the first call would
end the process. Otherwise it is built again, and where the cache cannot be trusted or used, in a
temporary folder. One thread of one process builds, the others wait for it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from softmax_rnn._utils.files import sync
from softmax_rnn._utils.integrity import sha256
from softmax_rnn._utils.machine import cache_folder
from softmax_rnn._utils.trusted import locked, open_own, own_folder
from softmax_rnn.ops.compiler import constant_when_compiled

# For fewer tokens PyTorch's operations are as fast, and the library need not be built.
LEAST_TOKENS = 256
VARIABLE = "SOFTMAX_RNN_CPU_KERNEL"
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fPIC")
_SECONDS = 300  # to compile, and to wait for another process; an idle core needs 2
_SEAL = 64  # bytes at the end of a library in the cache: a hash


@constant_when_compiled
def missing(build: bool = False) -> str:
    """Why there is no library, in words; empty if there is one, or it can be built.

    With ``build`` it is built if need be. There is one warning if that fails.
    """
    if sys.platform != "linux":
        return "the C++ is built on Linux alone"
    if os.environ.get(VARIABLE, "1") == "0":
        return f"{VARIABLE}=0"
    if build:
        with suppress(OSError):
            load()
    if _failures:
        return _failures[0]
    return "" if _compiler() else "there is no g++ on the path"


@constant_when_compiled
def threads() -> int:
    """PyTorch's current number of threads."""
    return torch.get_num_threads()


def run(
    name: str, call: type[ctypes.Structure], tensors: dict[str, Tensor], **numbers: object
) -> None:
    """Call a function of the library, of the floating-point type of the first tensor.

    ``call`` is the structure of its argument. Its pointers are those of ``tensors``, which are
    contiguous, and 0 where there is none.
    """
    tensors = {name: x.resolve_neg() for name, x in tensors.items()}
    assert all(x.is_cpu for x in tensors.values()), "The library reads the memory of the CPU."
    pointers = {name: x.data_ptr() for name, x in tensors.items()}
    arguments = call(**pointers, **numbers, threads=threads())
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    load()[f"{name}_{dtype}"](ctypes.byref(arguments))


def load() -> ctypes.CDLL:
    """The library, built if it is not in the cache.

    Raises:
        OSError: if it cannot be built or loaded; the first time there is also a warning.
    """
    with _one_thread:
        if _failures:
            raise OSError(_failures[0])
        try:
            return _loaded()
        except (OSError, subprocess.SubprocessError) as problem:
            _failures.append(f"form='native' cannot be built: {_said(problem)}")
            warnings.warn(
                f"{_failures[0]}\nOther forms are used instead, which are slower on a CPU. "
                f"{VARIABLE}=0 hides this message.",
                stacklevel=2,
            )
            raise OSError(_failures[0]) from problem


def _said(problem: Exception) -> str:
    """The line of a failed command, or of an error, that gives the reason."""
    said = (getattr(problem, "stderr", None) or "").strip()
    said = said or getattr(problem, "strerror", None) or str(problem)
    return next((line for line in said.splitlines() if "error" in line), said)


_one_thread = threading.Lock()


def _unlock() -> None:
    """In a forked process no thread builds, even if one did in the process that it comes from."""
    global _one_thread
    _one_thread = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


_failures: list[str] = []


@functools.cache
def _compiler() -> str | None:
    return shutil.which("g++")


@functools.cache
def _loaded() -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise OSError("there is no g++ on the path.")
    key = _key(compiler)
    try:
        return _library(_cached(compiler, key))
    except (OSError, subprocess.CalledProcessError) as problem:  # also where the disk is full
        with tempfile.TemporaryDirectory() as path, own_folder(Path(path)) as own:
            library = _library(_verified(_built(compiler, key, own), key))
        warnings.warn(
            f"The cache of compiled code cannot be used: {_said(problem)}\nThe code was compiled "
            "for this process alone. SOFTMAX_RNN_CACHE can name another folder for caches.",
            stacklevel=2,
        )
        return library


def folder() -> Path:
    """This user's part of the cache: users may share a cache, but nothing that is executed."""
    return cache_folder() / f"native-{os.geteuid()}"


def _cached(compiler: str, key: str) -> int:
    """The library in the cache, open; it is built if it is not there, or cannot be trusted."""
    named = folder()
    try:
        with own_folder(named) as own:
            library, building = own / f"{key}.so", own / "building"
            with suppress(OSError):
                return _verified(library, key)
            with locked(own / "lock", _SECONDS):
                try:
                    return _verified(library, key)  # another process has built it
                except FileNotFoundError:
                    pass
                except OSError as problem:
                    message = f"{named / library.name} is compiled again: {_said(problem)}"
                    warnings.warn(message, stacklevel=2)
                shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
                building.mkdir(mode=0o700)
                try:
                    _built(compiler, key, building).replace(library)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
                return _verified(library, key)
    except OSError as problem:
        raise OSError(f"{named}: {_said(problem)}") from problem


def _verified(path: Path, key: str) -> int:
    """A descriptor of a library of our own that is as it was written."""
    with open_own(path) as file:
        content = file.read()
        if content[-_SEAL:] != _seal(content[:-_SEAL], key):
            raise OSError("it is damaged")
        return os.dup(file.fileno())


def _library(descriptor: int) -> ctypes.CDLL:
    """What was verified is loaded, whatever has its name by now.

    The descriptor is never closed: of another library with the same number, the loader would say
    that it has it already.
    """
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")


def _seal(content: bytes, key: str) -> bytes:
    return sha256(key.encode() + content).encode()


def _key(compiler: str) -> str:
    """Everything that the library depends on, as a hash: machines may share a cache."""
    options = [compiler, *_FLAGS, "-Q", "--help=target"]  # what -march=native means here
    parts = [path.read_text() for path in (*HEADERS, *SOURCES)]
    parts += [_output(options), _output([compiler, "--version"])]
    parts += [platform.machine(), torch.__version__, *_FLAGS]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _built(compiler: str, key: str, folder: Path) -> Path:
    """Compile in an empty folder."""
    libraries = Path(torch.__file__).parent / "lib"
    objects, library = [f"{path.stem}.o" for path in SOURCES], folder / "native.so"
    # Linked without OpenMP, so that its functions are those of PyTorch's own library: a second
    # one would have its own threads, and matrix products would not know that they run in one.
    for command in (
        [compiler, *_FLAGS, "-c", *map(str, SOURCES)],
        [compiler, "-shared", *objects, f"-L{libraries}", "-ltorch_cpu", "-o", library.name],
    ):
        _output(command, folder)
    library.chmod(0o600)
    with library.open("ab") as file:
        file.write(_seal(library.read_bytes(), key))
    sync(library)  # else a crash could leave a part of it
    return library


def _output(command: list[str], folder: Path | None = None) -> str:
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=_SECONDS,
        cwd=folder,
        env={**os.environ, "TMPDIR": "."} if folder else None,  # g++'s own files are there as well
    )
    return run.stdout
