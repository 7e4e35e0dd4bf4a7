"""The command doctor: what it finds on this machine, and what it says where something is wrong."""

from __future__ import annotations

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import softmax_rnn as sr
from softmax_rnn.cli import doctor
from softmax_rnn.cli.main import main
from softmax_rnn.ops import plan
from softmax_rnn.ops.forms.cpu import cpp
from softmax_rnn.ops.forms.row_sums import RowSums

SOURCE = Path(sr.__file__).parent


def test_here_every_form_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["problems"]
    rows = {row["form"]: row for row in found["forms"] if row["device"] == "cpu"}
    for name in doctor.SPECS:
        for form, lack in sr.forms(name, explain=True).items():
            assert (rows[form]["cannot"].get(name, "")) == lack
            assert (name in rows[form]["errors"]) == (not lack)
        assert 0 < rows["auto"]["errors"][name] < 1e-5
    assert {*rows["token by token"]["errors"]} == {"taylor:2", "taylor:2+decay"}
    versions = {row["name"]: row for row in found["versions"]}
    assert versions["torch"]["supported"] == ">=2.11"
    assert versions["transformers"]["extra"] == "hf"
    assert "pytest" not in versions


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SPECS", ("norm", "taylor:2"))


def _doubled(*arguments: Any, **options: Any) -> RowSums:
    rows = plan.FORMS["dense"].compute(*arguments, **options)
    return rows._replace(numerator=2 * rows.numerator)


def _raises(*_: Any, **__: Any) -> RowSums:
    raise RuntimeError("no such thing\nat all")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (_doubled, r"gives wrong numbers for taylor:2 on cpu \(relative error [12]\.\de\+00\): "),
        (_raises, "fails for norm on cpu: RuntimeError: no such thing\n"),
    ],
)
def test_a_wrong_form_is_told(
    compute: Any, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(plan.FORMS, "blocked", plan.FORMS["blocked"]._replace(compute=compute))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert re.search(f"PROBLEM: form='blocked' {told}", shown), shown
    assert shown.count("PROBLEM") == 1 + (compute is _raises)  # the norm hides a factor


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("/bin/sh\necho 'error: broken' >&2; exit 1", 1, "g++ fails: error: broken"),
        ("/bin/sh\necho 'error: broken' >&2; exit 1", 1, "cannot be built: error: broken"),
        ("/no/such/shell\n", 1, "g++ cannot be run: No such file"),
        (None, 0, "g++: none on the path"),
    ],
)
def test_the_compiler(
    script: str | None,
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that fails is a problem; none is not."""
    if cpp.missing() not in ("", "there is no g++ on the path"):
        pytest.skip(cpp.missing())
    if script:
        (tmp_path / "g++").write_text(f"#!{script}\n")
        (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cpp, "_failures", [])
    for name in ("_loaded", "_compiler"):
        monkeypatch.setattr(cpp, name, functools.cache(getattr(cpp, name).__wrapped__))
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert told in shown
    assert "PROBLEM" in shown if code else "No problem was found." in shown


@pytest.mark.usefixtures("quick")
def test_versions_that_are_not_supported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = doctor.metadata.version
    old = {"torch": "2.5.1+cu124"}
    monkeypatch.setattr(doctor.metadata, "version", lambda name: old.get(name) or version(name))
    assert main(["doctor"]) == 1
    assert "PROBLEM: torch 2.5.1+cu124 is not supported: pip install 'torch>=2.11'\n" in (
        capsys.readouterr().out
    )


def test_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"kind": "pairs", "dtype": "torch.bfloat16", "failure": ""}
    wrong = row | {"failure": "its sums has a relative error of 1.0e+00"}
    monkeypatch.setattr(doctor, "proofs", lambda device: [row, row, wrong])
    found = doctor._kernels("cpu")
    assert found["failures"] == [wrong]
    counts = {(x["kind"], x["dtype"]): (x["proved"], x["failed"]) for x in found["tried"]}
    assert counts.pop(("pairs", "torch.bfloat16")) == (2, 1)
    assert {*counts.values()} == {(0, 0)}


def test_no_folder_for_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without a home folder the forms warn, and the rest is told all the same."""

    def homeless(*_: object) -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("SOFTMAX_RNN_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="SOFTMAX_RNN_CACHE can name a folder"):
        doctor.proofs(doctor.torch.device("cpu"))
    assert not doctor._kernels("cpu")["failures"]
    assert "Triton" not in str(doctor._caches())


def test_every_variable_that_is_read_is_named() -> None:
    read = set()
    for path in SOURCE.rglob("*.py"):
        pattern = r"environ(?:\.get\(|\[)(?:\"(\w+)\"|(\w+))"
        for quoted, constant in re.findall(pattern, path.read_text(encoding="utf-8")):
            if path != Path(doctor.__file__) or quoted:
                name = path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".")
                read.add(quoted or getattr(importlib.import_module(name), constant))
    assert {"SOFTMAX_RNN_CACHE", cpp.VARIABLE, "TOKENIZERS_PARALLELISM"} <= read
    assert read <= {*doctor.VARIABLES}


def test_sizes_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("native-0", 10), ("corpus-ab", 200), ("mine", 1)):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_bytes(bytes(size))
    (tmp_path / "native-0" / "broken").symlink_to("nowhere")
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path))
    sizes = {row["what"]: row["bytes"] for row in doctor._caches() if str(tmp_path) in row["path"]}
    assert sizes == {"compiled C++": 17, "prepared corpora": 200, "other files": 1}
