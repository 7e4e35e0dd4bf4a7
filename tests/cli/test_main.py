"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import errno
import re
import signal
from pathlib import Path

import pytest

import softmax_rnn
from made_up import made_up
from softmax_rnn._utils import files
from softmax_rnn._utils.errors import EXIT_CODES
from softmax_rnn.cli import main as cli
from softmax_rnn.cli.main import main
from softmax_rnn.cli.parser import with_flags
from softmax_rnn.training import RunConfig
from softmax_rnn.training.stopping import RunStopped, StopRequest


@pytest.mark.parametrize("command", ["train", "compare", "reproduce", "generate"])
def test_help_shows_hyphens(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = re.findall(r"(?<![\w-])--[\w-]+", capsys.readouterr().out)
    assert any("-" in option[2:] for option in options)
    assert not any("_" in option for option in options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nrom"], "Did you mean 'norm'?"),
        (["compare", "softmax_l2", "norm"], "'softmax_l2' and 'norm' are the same variant"),
        (["compare", "softmax", "--seeds", "0", "0"], "A seed is given twice: 0, 0"),
        (["compare", "softmax", "--parallel", "0"], "parallel must be at least 1, not 0"),
        (["train", "--corpus", ""], "No file matches the corpus ''"),
        (["compare", "--preset", "dmo"], "Unknown preset 'dmo'. Did you mean 'demo'?"),
        (["compare", "--stepz", "3"], "--stepz. Did you mean '--steps'?"),
        (["train", "--stpes", "20"], "--stpes 20. Did you mean '--steps'?"),
        (["train", "--step", "20"], "--step 20. Did you mean '--steps'?"),  # no abbreviations
        (["compare", "softmax", "mine=no.yaml"], "There is no file no.yaml"),
        (["compare", "softmax", "--dry-run", "--gpu", "H20"], "Did you mean 'H200'?"),
        (["compare", "softmax", "--cluster", "slurn"], "Did you mean 'slurm'?"),
        (["compare", "softmax", "--cluster-options", "a"], "KEY=VALUE words, not 'a'"),
        (["train", "-steps", "20"], "-steps 20. Did you mean '--steps'?"),
        (["train", "-steps=20"], "-steps=20. Did you mean '--steps'?"),
        (["compare", "norm", "-block-size", "20"], "Did you mean '--block-size'?"),
        (["prepare", "stdlib", "-end-of-txt", "a"], "Did you mean '--end-of-text'?"),
        (["train", "--steps", "many"], "--steps must be an integer, not many."),
        (["train", "--max-tokens", "x"], "--max-tokens must be an integer or null, not x."),
        (["train", "--precision", "fp8"], "--precision must be one of 'auto', 'fp32', 'bf16', not"),
        (["train", "--steps", "0"], "--steps must be greater than or equal to 1, not 0."),
        (["train", "--log-every", "7"], "--log-every 7 must divide --evaluate-every 250."),
        (["train", "--schedule-steps", "3"], "--schedule-steps 3 must be at least --steps 1000:"),
        (
            ["train", "--block-size", "99999999"],
            "smaller --block-size or a smaller --test-fraction",
        ),
        (["prepare", "stdlib", "--encoding", "latin-0"], "--encoding 'latin-0' names 'latin-0'"),
        (["prepare", "stdlib", "--bad-files", "no"], "--bad-files must be one of 'error', 'skip'"),
        (["reproduce", "figure4", "--with", "block_size=1"], "error: block_size must be greater"),
        (["train", "--num-heads", "3"], "--num-heads 3 must divide --hidden-size 128"),
        (["train", "--corpus", "no/such/*.txt"], "No file matches the corpus 'no/such/*.txt'"),
        (["train", "--config", "no_such.yaml"], "no_such.yaml"),
        (["report", "no/such"], "There is no folder no/such"),
        (["reproduce", "figure7"], "Unknown figure 'figure7'. Did you mean 'figure"),
        (["reproduce", "figure4", "--scale", "papr"], "Did you mean 'paper'?"),
        (["reproduce", "figure4", "--dry-run", "--gpu", "H20"], "Did you mean 'H200'?"),
        (["reproduce", "figure4", "--with", "steps"], "KEY=VALUE words, not 'steps'"),
        (["reproduce", "figure4", "--with", "stepz=3"], "Did you mean 'steps'?"),
        (["claims", "no/such"], "No finished run of scale 'demo' in no/such"),
        (["generate", "no/such", "--prompt", "a"], "no/such holds no model"),
        (["analyze", "no/such"], "no/such"),
        (["trian"], "Did you mean 'train'?"),
        (["train", "--stop-after", "90"], "written as in 2d, 1h50m or 90s, not '90'"),
        (["compare", "softmax", "--stop-after", "soon"], "1h50m or 90s, not 'soon'"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    told = capsys.readouterr().err
    assert code == 2
    assert message in told
    assert "Traceback" not in told
    assert len(told.splitlines()) <= 4


def test_an_unknown_key_of_a_config_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("learning_rat: 0.1\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(tmp_path / "config.yaml")])
    assert "Did you mean 'learning_rate'?" in capsys.readouterr().err


def test_the_preset_of_a_config_file_is_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunConfig] = []

    def stop(config: RunConfig, *_: object, **__: object) -> None:
        seen.append(config)
        raise OverflowError("far too large")

    monkeypatch.setattr("softmax_rnn.training.train", stop)
    file = tmp_path / "config.yaml"
    file.write_text("preset: small\nsteps: 20_000\n")
    assert main(["train", "--config", str(file), "--seed", "3"]) == 1
    assert seen.pop() == RunConfig.preset("small", steps=20_000, seed=3)
    assert main(["train", "--config", str(file), "--preset", "large"]) == 1
    assert seen.pop() == RunConfig.preset("large", steps=20_000)
    file.write_text("preset: smal\n")
    assert main(["train", "--config", str(file)]) == 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OverflowError("too much"), "OverflowError: too much"),
        (MemoryError("too much"), "MemoryError: too much"),
        (FloatingPointError("too much"), "FloatingPointError: too much"),
        (RuntimeError("CPU: can't allocate memory"), "CPU: can't allocate memory"),
    ],
)
def test_what_the_machine_cannot_do_is_told_in_a_line(
    error: Exception,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("softmax_rnn.training.train", fail)
    assert main(["train", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train"], "stopped; rerun the same command with --resume to resume\n"),
        (["train", "--resume"], "stopped; rerun the same command to resume\n"),
        (["compare"], "stopped; rerun the same command to resume\n"),
    ],
)
def test_stopping_is_told_in_a_line(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("training.train", "experiments.scheduler.run_all"):
        monkeypatch.setattr(f"softmax_rnn.{name}", interrupt)
    assert main([*words, "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_stopped_run_has_its_own_exit_code(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[float] = []

    def stop(*_: object, stop_after: float, **__: object) -> None:
        seen.append(stop_after)
        raise RunStopped(signal.SIGTERM, "after step 7")

    for name in ("training.train", "experiments.scheduler.run_all"):
        monkeypatch.setattr(f"softmax_rnn.{name}", stop)
    assert main([command, "--out", str(tmp_path / "run"), "--stop-after", "1h50m"]) == 75
    resume = " with --resume" if command == "train" else ""
    told = f"Stopped by SIGTERM after step 7; rerun the same command{resume} to resume\n"
    assert capsys.readouterr().err == told
    assert seen == [6600]


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Available subcommands: compare train variants" in shown
    page = Path(__file__).parents[2].joinpath("docs/howto/train.md").read_text()
    for code, about in EXIT_CODES.items():
        assert f"{code:d} {about}" in shown
        assert f"| {code:d} | {about} |" in page


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert softmax_rnn.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "processes", "at_once"), [(0, "1", False), (0, "2", True), (75, "1", True)]
)
def test_how_a_process_ends(
    code: int, processes: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without interpreter shutdown if that could change the exit code; exit functions run."""
    calls: list[object] = []
    monkeypatch.setattr(StopRequest, "ends_process", False)
    monkeypatch.setattr(cli, "main", lambda: code)
    monkeypatch.setattr(cli.atexit, "_run_exitfuncs", lambda: calls.append("atexit"))
    monkeypatch.setattr(cli.os, "_exit", calls.append)
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(SystemExit) as stop:  # os._exit is replaced here
        cli.process()
    assert stop.value.code == code
    assert calls == (["atexit", code] if at_once else [])


@pytest.mark.parametrize(
    "words",
    [
        ["report", "runs"],
        ["analyze", "runs/norm-0", "--out", "file/below"],
        ["compare", "softmax", "--out", "file", "--corpus", "stdlib"],
        ["train", "--out", "x" * 300],
    ],
)
def test_an_unusable_folder_is_wrong_input(
    words: list[str],
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error comes before any work."""
    made_up(tmp_path / "runs", "norm", 0, 1.5)
    (tmp_path / "file").touch()

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    words = [str(texts) if word == "stdlib" else word for word in words]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert re.search(r"Nothing can be written in .* \(.*\): choose|File name too long", told)


@pytest.mark.parametrize(
    ("words", "message", "expected"),
    [
        ("train", "block_size must be 3.", "--block-size must be 3."),
        ("train", "steps must be 3, not 2.", "--steps must be 3, not 2."),
        ("train", "The steps must be 3.", "The steps must be 3."),
        ("train", "Give a smaller batch_size.", "Give a smaller --batch-size."),
        ("train", "use seed=3, steps=4.", "use --seed 3, --steps 4."),
        (
            "train",
            "Allowed: steps, block_size, num_heads.",
            "Allowed: steps, block_size, num_heads.",
        ),
        ("train", "in '/a/block_size/b' and a.block_size", "in '/a/block_size/b' and a.block_size"),
        ("train", "the key 'block_size' of `block_size`", "the key 'block_size' of `block_size`"),
        ("train", "rerun with --skip_non_finite", "rerun with --skip-non-finite"),
        ("train", "max_norm=3 and my_block_size=4", "max_norm=3 and my_block_size=4"),
        ("reproduce", "block_size=3 and parallel=2", "block_size=3 and --parallel 2"),
        ("evaluate", "give corpus=NAME", "give --corpus NAME"),
        ("trian", "block_size", "block_size"),
    ],
)
def test_messages_name_the_options_of_the_command(words: str, message: str, expected: str) -> None:
    assert with_flags(words.split(), message) == expected
