"""softmax-rnn calibrate, and when the commands that train measure the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from softmax_rnn.cli.command import measure_machine
from softmax_rnn.cli.main import main
from softmax_rnn.ops import calibration, speeds


@pytest.fixture(autouse=True)
def _measurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path))
    monkeypatch.delenv(speeds.VARIABLE)
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))
    speeds._read.cache_clear()
    yield
    speeds._read.cache_clear()


def test_it_shows_and_keeps_the_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 0
    shown = capsys.readouterr().out
    assert "multiply" in shown
    assert "chunks" in shown
    assert speeds.file().exists()
    assert str(speeds.file()) in shown.replace("\n", "")


def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", "/dev/null/nothing")
    measure_machine()
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "speeds of this machine are not measured, as they cannot be kept" in shown


def test_a_busy_machine_is_not_measured_by_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (97.0, 0.1, 0.1))
    measure_machine()
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "not measured: its load in the last minute was 97.0 on" in shown
    assert not speeds.file().exists()
    assert main(["calibrate"]) == 0
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "These may be wrong: its load in the last minute was 97.0 on" in shown
    assert speeds.file().exists()


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def calibrate() -> Path:
        measured.append(1)
        return speeds.save(speeds.SHIPPED)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setenv("WORLD_SIZE", "2")
    measure_machine()  # one of several processes: they would disturb each other
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv(speeds.VARIABLE, "shipped")
    measure_machine()
    monkeypatch.delenv(speeds.VARIABLE)
    assert not measured
    measure_machine()
    measure_machine()
    assert len(measured) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--steps", "0"],
        ["train", "--corpus", "no/such"],
        ["train", "--block-size", "99999999"],
        ["compare", "softmax", "--corpus", "no/such"],
    ],
)
def test_an_error_comes_alone(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (97.0, 0.1, 0.1))
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert capfd.readouterr().err.startswith("error: ")
