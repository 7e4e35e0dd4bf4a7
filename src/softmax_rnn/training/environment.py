"""The environment of a run: versions, commit, machine."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from softmax_rnn._utils.machine import in_proc, processor

_PACKAGES = (
    *("softmax-rnn", "torch", "transformers", "accelerate", "tokenizers", "numpy", "triton"),
    "lm_eval",
)


def environment() -> dict[str, Any]:
    """Versions of main packages, the commit of a source checkout, processor, memory and GPUs."""
    return {
        "python": platform.python_version(),
        "packages": _versions(),
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def peak_memory() -> int:
    """Peak bytes so far: of the GPU allocator if there is a GPU, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # The value of getrusage starts at the peak of the parent process.
    if found := in_proc("self/status", r"VmHWM:\s+(\d+) kB"):
        return int(found) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions() -> dict[str, str]:
    """The versions of the main packages that are installed."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _commit() -> str | None:
    """The commit of the checkout with this package; ``+`` if there are uncommitted changes."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # else the repository is another project's
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    except (OSError, subprocess.CalledProcessError):
        return None
