"""Wheel and sdist: built, installed elsewhere, and used there from outside the source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import softmax_rnn

ROOT = Path(__file__).parents[1]

# A user's program: right numbers, in C++ where there is g++.
USE = """
import torch, softmax_rnn as sr
from pathlib import Path
assert Path(sr.__file__).is_relative_to({place!r}), sr.__file__
assert sr.__version__ == {version!r}
q, k, v = torch.randn(3, 1, 2, 400, 8, requires_grad=True).unbind(0)
for spec in ("norm", "taylor:2"):
    out = sr.attention(q, k, v, spec)
    exact = sr.attention(q.double(), k.double(), v.double(), spec, form="dense")
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-4)
out.sum().backward()
"""
CPP = """
import torch, softmax_rnn as sr
q, k, v = torch.randn(3, 1, 2, 400, 8).unbind(0)
assert sr.attention(q, k, v, "norm", form="native").isfinite().all()
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


@pytest.mark.slow
def test_an_installed_wheel_computes_and_is_typed(built: tuple[Path, Path], tmp_path: Path) -> None:
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    site = next((place / "lib").glob("python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check")
    subprocess.run([*pip, *offline, built[0]], check=True, capture_output=True)
    # Of the tests' environment everything but this package, whose .pth file is not read there.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def use(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(code)
        env = {**os.environ, "SOFTMAX_RNN_CACHE": str(tmp_path / "cache"), **variables}
        env.pop("PYTHONPATH", None)
        return subprocess.run(
            [python, program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    code = USE.format(place=str(place), version=softmax_rnn.__version__)
    ended = use(code)
    assert ended.returncode == 0, ended.stderr
    if shutil.which("g++"):
        ended = use(CPP)
        assert ended.returncode == 0, ended.stderr
    ended = use(code, PATH="")  # no g++
    assert ended.returncode == 0, ended.stderr
    assert use(
        code.replace("assert_close(out.double()", "assert_close(1 + out.double()")
    ).returncode

    (tmp_path / "user.py").write_text(TYPED)
    # Reading the types of PyTorch takes minutes, and they are not ours.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,transformers.*,numpy.*]\nfollow_imports = skip\n"
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = [line for line in checked.stdout.splitlines() if "error:" in line]
    assert wrong, checked.stderr
    assert all(line.startswith("user.py:11:") for line in wrong), checked.stdout


def test_citation_and_release_notes_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == softmax_rnn.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d\S*)", changes, flags=re.M)
    assert versions[0] == softmax_rnn.__version__
    assert citation["preferred-citation"]["url"] in (ROOT / "README.md").read_text(encoding="utf-8")
