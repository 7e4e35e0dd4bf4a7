"""Wheel and sdist: built, installed elsewhere, and used there from outside the source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import softmax_rnn

ROOT = Path(__file__).parents[1]

# A user's program: right numbers, in C++ where there is g++. Only torch and numpy are there.
USE = """
import sys, torch, softmax_rnn as sr
from importlib.util import find_spec
from pathlib import Path
from softmax_rnn.cli.main import main
assert Path(sr.__file__).is_relative_to(sys.prefix), sr.__file__
assert sr.__version__ == {version!r}
q, k, v = torch.randn(3, 1, 2, 400, 8, requires_grad=True).unbind(0)
for spec in ("norm", "taylor:2"):
    out = sr.attention(q, k, v, spec)
    exact = sr.attention(q.double(), k.double(), v.double(), spec, form="dense")
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-4)
out.sum().backward()
lack = sr.forms("norm", explain=True)["native"]
print("C++" if not lack else lack)
if not lack:
    assert sr.attention(q, k, v, "norm", form="native").isfinite().all()
try:
    torch.testing.assert_close(1 + out.double(), exact, rtol=1e-3, atol=1e-4)
except AssertionError:
    pass
else:
    raise SystemExit("a wrong number is not seen")
if not find_spec("jsonargparse"):
    assert main(["doctor"]) == 2  # says what to install
"""
# A user's program for `mypy --strict`; the last line is wrong.
TYPED = """
import torch
import softmax_rnn as sr

q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
out: torch.Tensor = sr.attention(q, k, v, "norm", causal=True)
spec: sr.AttentionSpec = sr.AttentionSpec(series="taylor", order=2)
layer = sr.Attention(16, 2, spec)
stream: sr.Stream = sr.Stream("taylor:2")
names: list[str] = [name for name in sr.variants()]
size: int = sr.AttentionSpec(order="two")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of a copy of the tracked files, built without the network."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        ignore = {"ignore": shutil.ignore_patterns("*.egg-info", "__pycache__")}
        copy(ROOT / name, source / name, **(ignore if copy is shutil.copytree else {}))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_wheel_and_sdist_have_every_file(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "softmax_rnn").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {".cpp", ".h", ".jinja", ".py"} <= {Path(name).suffix for name in files}
    assert "softmax_rnn/py.typed" in files
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == files
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in files} | {"LICENSE", "README.md"} <= names


def environment(place: Path, python: Path | str, wheel: Path) -> Path:
    """A virtual environment of a Python with the wheel alone; its folder of packages."""
    command = [python, "-m", "venv", "--without-pip", "--symlinks", place]
    subprocess.run(command, check=True, capture_output=True)
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--quiet"]
    offline = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    subprocess.run([*pip, *offline, wheel], check=True, capture_output=True)
    return next((place / "lib").glob("python*/site-packages"))


def link_base(folder: Path) -> None:
    """Links to torch, numpy and all that they need, of the tests' environment."""
    names, found = ["torch", "numpy"], set[str]()
    while names:
        name = names.pop()
        if name in found:
            continue
        found.add(name)
        of = distribution(name)
        needed = (Requirement(line) for line in of.requires or ())
        names += [each.name for each in needed if each.marker is None or each.marker.evaluate()]
        for top in {Path(file).parts[0] for file in of.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(of.locate_file(top))))


def run(place: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an environment beside it, with a cache of its own."""
    env = {**os.environ, "SOFTMAX_RNN_CACHE": str(place / "cache"), **variables}
    env.pop("PYTHONPATH", None)
    words = [place / "bin" / command[0], *command[1:]]
    return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_installed_wheel_computes_and_is_typed(built: tuple[Path, Path], tmp_path: Path) -> None:
    place = tmp_path / "environment"
    site = environment(place, sys.executable, built[0])
    link_base(site)
    program = place / "program.py"
    program.write_text(USE.format(version=softmax_rnn.__version__))
    compiler = shutil.which("g++")
    for path, told in ((os.environ["PATH"], "C++" if compiler else "g++"), ("", "g++")):
        ended = run(place, "python", program, PATH=path)
        assert ended.returncode == 0, ended.stderr
        assert told in ended.stdout
        assert "pip install 'softmax-rnn[train]'" in ended.stderr

    # With the extras: of the tests' environment everything but this package, whose .pth file is
    # not read there.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ended = run(place, "softmax-rnn", "doctor", PATH="")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "g++: none on the path" in ended.stdout
    assert f"softmax-rnn  {softmax_rnn.__version__}" in re.sub(" +", "  ", ended.stdout)
    assert "No problem was found." in ended.stdout

    (place / "user.py").write_text(TYPED)
    # Reading the types of PyTorch takes minutes, and they are not ours.
    (place / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,transformers.*,numpy.*]\nfollow_imports = skip\n"
    )
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--python-executable",
            place / "bin" / "python",
            "user.py",
        ],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = [line for line in checked.stdout.splitlines() if "error:" in line]
    assert wrong, checked.stderr
    assert all(line.startswith("user.py:11:") for line in wrong), checked.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["python3.11", "python3.12", "python3.13"])
def test_the_wheel_suits_every_python_at_hand(
    name: str, built: tuple[Path, Path], tmp_path: Path
) -> None:
    """It is installed there and every file is compiled; it computes where there is torch."""
    if name == f"python3.{sys.version_info.minor}":
        pytest.skip("the test above is of this Python")
    python = shutil.which(name)
    if python is None:
        pytest.skip(f"no {name} on PATH")
    tried = subprocess.run(
        [python, "-c", "import venv"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"{name} does not run: {tried.stderr.strip().partition(chr(10))[0]}")
    place = tmp_path / "environment"
    site = environment(place, python, built[0])
    compiled = run(place, "python", "-m", "compileall", "-q", site / "softmax_rnn")
    assert compiled.returncode == 0, compiled.stdout
    (site / "softmax_rnn" / "fault.py").write_text("match = (:\n")
    assert run(place, "python", "-m", "compileall", "-q", site / "softmax_rnn").returncode
    where = "import torch, numpy; from pathlib import Path; print(Path(torch.__file__).parents[1])"
    torch = subprocess.run([python, "-c", where], capture_output=True, text=True, check=False)
    if torch.returncode:
        pytest.skip(f"{name} has no torch: installed and compiled, not run")
    (site / "others.pth").write_text(torch.stdout)
    program = place / "program.py"
    program.write_text(USE.format(version=softmax_rnn.__version__))
    ended = run(place, "python", program)
    assert ended.returncode == 0, ended.stderr


def test_citation_and_release_notes_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == softmax_rnn.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d\S*)", changes, flags=re.M)
    assert versions[0] == softmax_rnn.__version__
    assert citation["preferred-citation"]["url"] in (ROOT / "README.md").read_text(encoding="utf-8")
