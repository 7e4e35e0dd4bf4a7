"""The command ``doctor``: what is installed, and whether every form gives the right number here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

import softmax_rnn as sr
from softmax_rnn._utils.errors import ExitCode
from softmax_rnn._utils.machine import cache_folder
from softmax_rnn._utils.units import bytes_text
from softmax_rnn.cli.command import Command, show
from softmax_rnn.ops import proofs

PACKAGE = "softmax-rnn"
# An attention of each kind: exp, exp without a row sum, a state, a state that fades.
SPECS = ("softmax", "norm", "taylor:2", "taylor:2+decay")
TOKENS = 320  # enough for the chunks in C++
# Relative errors of float32 that are not rounding. On a GPU products may be TF32.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
# What a folder in the cache begins with.
CACHED = {
    "native": "compiled C++",
    "kernels": "proofs of GPU kernels",
    "corpus": "prepared corpora",
    "compiled": "whether torch.compile pays",
}
# The environment variables that the library reads; of other libraries those that matter here.
VARIABLES = {
    "SOFTMAX_RNN_CACHE": "folder of the library's caches",
    "SOFTMAX_RNN_CPU_KERNEL": "0: no C++",
    "XDG_CACHE_HOME": "folder of caches where the variable above names none",
    "TRITON_INTERPRET": "1: GPU kernels run in Triton's interpreter, for tests",
    "TRITON_CACHE_DIR": "folder of Triton's cache",
    "HF_HOME": "folder of Hugging Face's caches",
    "HF_HUB_CACHE": "folder of models and datasets of the Hugging Face Hub",
    "HF_HUB_OFFLINE": "1: nothing is downloaded",
    "OMP_NUM_THREADS": "threads of PyTorch and of the C++",
    "CUDA_VISIBLE_DEVICES": "GPUs that are used",
    "TOKENIZERS_PARALLELISM": "whether tokenizers start threads",
    "RANK": "number of this process in a run of several",
    "WORLD_SIZE": "number of these processes",
}


def diagnosis() -> dict[str, Any]:
    """Everything that the command prints, as plain data."""
    from softmax_rnn.training.environment import environment

    versions, problems = _versions()
    machine = environment()
    machine["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    gpus = range(torch.cuda.device_count())
    machine["gpu_capabilities"] = [torch.cuda.get_device_capability(index) for index in gpus]
    machine["compiler"] = _compiler()
    unavailable = sr.forms("softmax", explain=True)["native"]
    forms: list[dict[str, Any]] = []
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device in _devices():
            forms += _forms(device)
    seconds = round(time.perf_counter() - began, 1)
    for row in forms:
        for spec, error in row["errors"].items():
            if not error <= TOLERANCE[torch.device(row["device"]).type]:
                name = f"form={row['form']!r} gives wrong numbers for {spec} on {row['device']}"
                problems.append(f"{name} (relative error {error:.1e}): please report this.")
        for spec, words in row["failed"].items():
            problems.append(f"form={row['form']!r} fails for {spec} on {row['device']}: {words}")
    # Where there can be no library, a warning says nothing new.
    told = dict.fromkeys(str(warning.message) for warning in caught)
    problems += [words for words in told if not (unavailable and "form='native'" in words)]
    return {
        "versions": versions,
        "machine": machine,
        "forms": forms,
        "seconds": seconds,
        "kernels": [_kernels(device) for device in _devices()[1:]],
        "caches": _caches(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "problems": problems,
    }


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _versions() -> tuple[list[dict[str, Any]], list[str]]:
    """Python and every direct dependency: installed, supported, of which extra; what is wrong."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        about = metadata.metadata(PACKAGE)
    except metadata.PackageNotFoundError:
        return [], [f"{PACKAGE} is not installed, but imported from a folder: pip install it."]
    needs = [("python", SpecifierSet(about["Requires-Python"]), "")]
    extras = [extra for extra in about.get_all("Provides-Extra") or [] if extra != "dev"]
    for line in about.get_all("Requires-Dist") or []:
        needed = Requirement(line)
        of = (x for x in ("", *extras) if not needed.marker or needed.marker.evaluate({"extra": x}))
        if needed.name != PACKAGE and (extra := next(of, None)) is not None:
            needs.append((needed.name, needed.specifier, extra))
    rows, problems = [], []
    for name, supported, extra in needs:
        found = platform.python_version() if name == "python" else _version(name)
        row = {"name": name, "installed": found, "supported": str(supported), "extra": extra}
        rows.append(row)
        if found is not None and not supported.contains(found, prereleases=True):
            problems.append(f"{name} {found} is not supported: pip install '{name}{supported}'")
    return rows, problems


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """The path and the version of g++, or why it does not run."""
    if (path := shutil.which("g++")) is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{path} cannot be run: {error.strerror}"
    told = (done.stdout or done.stderr).partition("\n")[0]
    return f"{path}: {told}" if not done.returncode else f"{path} fails: {told}"


def _forms(device: str) -> list[dict[str, Any]]:
    """What each form computes on a device, with its error, and what it cannot compute."""
    kind = torch.device(device).type
    ways: dict[str, Callable[..., Tensor]] = {"auto": sr.attention}
    ways |= dict.fromkeys(sr.forms("softmax", explain=True), sr.attention)
    ways["token by token"] = _token_by_token
    rows = []
    for form, compute in ways.items():
        row: dict[str, Any] = {"device": device, "form": form}
        row |= {"errors": {}, "failed": {}, "cannot": {}}
        for name in SPECS:
            asked = "recurrent" if compute is _token_by_token else form
            if lack := sr.forms(name, kind, explain=True).get(asked, ""):
                row["cannot"][name] = lack
                continue
            try:
                row["errors"][name] = _error(compute, name, asked, device)
            except Exception as error:
                said = str(error).strip().partition("\n")[0]
                row["failed"][name] = f"{type(error).__name__}: {said}"
        rows.append(row)
    return rows


def _error(compute: Callable[..., Tensor], name: str, form: str, device: str) -> float:
    """The largest error in float32, by the largest result of ``dense`` in float64 on the CPU."""
    draw = torch.Generator("cpu").manual_seed(0)
    size = (1, 4, TOKENS, 32)
    q, k, v = torch.randn(3, *size, generator=draw, dtype=torch.float64, device="cpu").unbind()
    decay = -0.05 * torch.rand(size[:3], generator=draw, dtype=torch.float64, device="cpu")
    exact_decay = decay if "+decay" in name else None
    with torch.inference_mode():
        exact = sr.attention(q, k, v, name, form="dense", log_decay=exact_decay)
        given = [x.to(device, torch.float32) for x in (q, k, v)]
        log_decay = None if exact_decay is None else exact_decay.to(device, torch.float32)
        out = compute(*given, name, form=form, log_decay=log_decay)
    return float((out.cpu().double() - exact).abs().max() / exact.abs().max())


def _token_by_token(
    q: Tensor, k: Tensor, v: Tensor, name: str, *, form: str, log_decay: Tensor | None
) -> Tensor:
    """As a model decodes: all but a few tokens at once, then each after the state before it."""
    stream, outs = sr.Stream(name), []
    for tokens in (slice(TOKENS - 4), *(slice(t, t + 1) for t in range(TOKENS - 4, TOKENS))):
        decay = {} if log_decay is None else {"log_decay": log_decay[:, :, tokens]}
        outs.append(stream(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], **decay))
    return torch.cat(outs, 2)


def _kernels(device: str) -> dict[str, Any]:
    """Which kernels have proved themselves on a device, and which have failed."""
    kept = []
    with suppress(OSError):  # of the folder: a warning of the forms has told it
        kept = proofs(torch.device(device))
    counts = Counter((row["kind"], row["dtype"], not row["failure"]) for row in kept)
    failed = [row for row in kept if row["failure"]]
    return {
        "device": device,
        "tried": [
            {"kind": kind, "dtype": dtype, "proved": counts[kind, dtype, True]}
            | {"failed": counts[kind, dtype, False]}
            for kind in ("pairs", "chunks")
            for dtype in ("torch.bfloat16", "torch.float16", "torch.float32")
        ],
        "failures": [{key: row[key] for key in ("kind", "dtype", "failure")} for row in failed],
    }


def _caches() -> list[dict[str, Any]]:
    """The cache folders that exist, with their sizes."""
    try:
        own = sorted(cache_folder().iterdir())
    except OSError:  # none yet, or no home folder
        own = []
    kinds = (CACHED.get(path.name.partition("-")[0], "other files") for path in own)
    places = list(zip(kinds, own, strict=True))
    triton = os.environ.get("TRITON_CACHE_DIR")
    with suppress(RuntimeError):  # no home folder
        triton = triton or str(Path.home() / ".triton" / "cache")
        places.append(("compiled GPU kernels (Triton)", Path(triton)))
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        places.append(("Hugging Face", Path(HF_HUB_CACHE)))
    except ModuleNotFoundError:
        pass
    found = [(what, path) for what, path in places if os.access(path, os.F_OK)]
    return [{"what": what, "path": str(path), "bytes": _size(path)} for what, path in found]


def _size(path: Path) -> int:
    """Bytes of the files in a folder; a link counts as itself."""
    files = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_size for file in files if os.path.lexists(file))


def _show(found: dict[str, Any]) -> None:
    from softmax_rnn.report.terminal import terminal_table

    header: tuple[str, ...] = ("package", "installed", "supported", "extra")
    here = [row for row in found["versions"] if row["installed"]]
    rows = [[row[key] or "" for key in ("name", "installed", "supported", "extra")] for row in here]
    show(terminal_table(header, [[PACKAGE, sr.__version__, "", ""], *rows], left=header))
    missing = [f"{x['name']} ({x['extra']})" for x in found["versions"] if not x["installed"]]
    if missing:
        print(f"Not installed, with the extra that needs it: {', '.join(missing)}")

    machine = found["machine"]
    print(f"\n{machine['platform']}, {bytes_text(machine['memory_bytes'])} of memory")
    cpu = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    print(f"CPU: {cpu}, PyTorch uses {machine['cpu_capability']}")
    without = "none on the path (on Linux, attention on a CPU is faster with it)"
    print(f"g++: {machine['compiler'] or without}")
    gpus = zip(machine["gpus"], machine["gpu_capabilities"], strict=True)
    shown = [f"{name}, capability {major}.{minor}" for name, (major, minor) in gpus]
    print(f"GPUs: {'; '.join(shown) or 'none'}")

    header = ("device", "form", "relative error of float32", "cannot compute")
    rows = []
    for row in found["forms"]:
        right = ", ".join(f"{name} {error:.0e}" for name, error in row["errors"].items())
        wrong = ", ".join(f"{name} failed" for name in row["failed"])
        reasons: dict[str, list[str]] = {}
        for name, lack in row["cannot"].items():
            reasons.setdefault(lack, []).append(name)
        cannot = "; ".join(f"{', '.join(names)}: {lack}" for lack, names in reasons.items())
        told = ", ".join(filter(None, (right, wrong)))
        rows.append([row["device"], row["form"], told, cannot])
    show(terminal_table(header, rows, left=header))
    print(f"These took {found['seconds']} s, with compilation where nothing was in the cache.")

    for gpu in found["kernels"]:
        print(f"\nGPU kernels on {gpu['device']}: sums and gradients compared with float64")
        header = ("kernel", "type", "proved", "failed")
        rows = [
            [row["kind"], row["dtype"], *map(str, (row["proved"], row["failed"]))]
            if row["proved"] + row["failed"]
            else [row["kind"], row["dtype"], "not tried", ""]
            for row in gpu["tried"]
        ]
        show(terminal_table(header, rows, left=header[:2]))

    header = ("cache", "size", "folder")
    rows = [[row["what"], bytes_text(row["bytes"]), row["path"]] for row in found["caches"]]
    show(terminal_table(header, rows, left=("cache", "folder")))
    header = ("variable", "value", "meaning")
    given = found["variables"]
    rows = [[name, given.get(name, "-"), about] for name, about in VARIABLES.items()]
    show(terminal_table(header, rows, left=header))
    for problem in found["problems"]:
        print(f"PROBLEM: {problem}")
    if not found["problems"]:
        print("No problem was found.")


def _options(parser: ArgumentParser, _: dict[str, Any]) -> None:
    parser.add_argument("--json", action="store_true", help="print plain data for programs")


def _doctor(parsed: Namespace) -> int:
    found = diagnosis()
    if parsed.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return ExitCode.FAILED if found["problems"] else ExitCode.FINISHED


COMMANDS = {
    "doctor": Command(
        "check this installation",
        _options,
        _doctor,
        about="Print versions, devices, caches and environment variables, and compute a small case "
        "of each form on every device, compared with float64. The exit code is 1 if something that "
        "should work does not: a sentence says what. A problem report should have this output.",
    ),
}
