"""The compiled ``native_*.cpp``: built for this CPU at its first use, then loaded from a cache.

The library is built with the machine's g++ for the machine's own instructions
(``-march=native``), so its file name is a hash of the source, the compiler, the CPU's instructions
and PyTorch, whose matrix products it calls. A process writes the file under another name and
renames it: several may build at once. Without a compiler, or with ``SOFTMAX_RNN_CPU_KERNEL=0``,
there is no library.
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
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from softmax_rnn._utils.machine import cache_folder
from softmax_rnn.ops.compiler import constant_when_compiled

# From this number of tokens on auto takes a native form, for which the library is built if need be.
LEAST_TOKENS = 256
VARIABLE = "SOFTMAX_RNN_CPU_KERNEL"
SOURCES = sorted(Path(__file__).parent.glob("native*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("native*.h"))
_FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fPIC")
_SECONDS = 300  # to compile; an idle core needs 2


@constant_when_compiled
def enabled() -> bool:
    """Whether the library is wanted here: on Linux, unless the environment says no."""
    return sys.platform == "linux" and os.environ.get(VARIABLE, "1") != "0"


@constant_when_compiled
def possible() -> bool:
    """Whether there is a compiler, and building with it has not failed."""
    return enabled() and _compiler() is not None and not _failures


@constant_when_compiled
def ready() -> bool:
    """Whether the library is loaded; builds it at the first call, and warns once if that fails."""
    if not enabled():
        return False
    try:
        load()
    except OSError:
        return False
    return True


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
    pointers = {name: x.data_ptr() for name, x in tensors.items()}
    arguments = call(**pointers, **numbers, threads=threads())
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    load()[f"{name}_{dtype}"](ctypes.byref(arguments))


def load() -> ctypes.CDLL:
    """The library, built if it is not in the cache.

    Raises:
        OSError: if it cannot be built or loaded; the first time there is also a warning.
    """
    if _failures:
        raise OSError(_failures[0])
    try:
        return _loaded()
    except (OSError, subprocess.SubprocessError) as problem:
        said = (getattr(problem, "stderr", None) or "").strip() or str(problem)
        reason = next((line for line in said.splitlines() if "error" in line), said)
        _failures.append(f"form='native' cannot be built: {reason}")
        warnings.warn(
            f"{_failures[0]}\nOther forms are used instead, which are slower on a CPU. "
            f"{VARIABLE}=0 hides this message.",
            stacklevel=2,
        )
        raise OSError(_failures[0]) from problem


_failures: list[str] = []


@functools.cache
def _compiler() -> str | None:
    return shutil.which("g++")


@functools.cache
def _loaded() -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise OSError("there is no g++ on the path.")
    library = cache_folder() / "native" / f"native-{_key(compiler)}.so"
    if library.exists():
        with suppress(OSError):
            return _opened(library)
    _build(compiler, library)  # also in place of a broken file
    return _opened(library)


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "token_float32"):
        raise OSError(f"{path} is another library.")
    return library


def _key(compiler: str) -> str:
    """Everything that the library depends on, as a hash: machines may share a cache."""
    options = [compiler, *_FLAGS, "-Q", "--help=target"]  # what -march=native means here
    parts = [path.read_text() for path in (*HEADERS, *SOURCES)]
    parts += [_output(options), _output([compiler, "--version"])]
    parts += [platform.machine(), torch.__version__, *_FLAGS]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _build(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects, linked = [f"{path.stem}.o" for path in SOURCES], Path(folder) / "native.so"
        # Linked without OpenMP, so that its functions are those of PyTorch's own library: a second
        # one would have its own threads, and matrix products would not know that they run in one.
        for command in (
            [compiler, *_FLAGS, "-c", *map(str, SOURCES)],
            [compiler, "-shared", *objects, f"-L{libraries}", "-ltorch_cpu", "-o", linked.name],
        ):
            _output(command, folder)
        with linked.open("rb") as file:
            os.fsync(file.fileno())  # else a crash could leave a part of it
        linked.replace(library)


def _output(command: list[str], folder: str | None = None) -> str:
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=_SECONDS,
        cwd=folder,
    )
    return run.stdout
