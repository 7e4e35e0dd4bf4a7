"""The folder of one run: what is in it, and reading it back.

config.yaml          the resolved configuration
environment.json     versions, commit, machine, attention in full, corpus; of later sessions the
                     first three, under `sessions`
metrics.jsonl        a row a logged step
evaluations.jsonl    a row an evaluation
events.jsonl         a row a step without update, and a row a leap of the loss
checkpoint-N/        complete ones only: written aside and renamed, with a manifest of hashes and
                     the rows so far
lock                 held by the process that writes here
test_losses.npy      the loss of every test block after the last step
summary.json         the results; its presence means that the run is finished
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from softmax_rnn._utils.files import file_aside, make_writable, sync, write_json, writing
from softmax_rnn._utils.validation import Count, NonNegative, PositiveInt, Text, validated
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.training.config import RunConfig

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ROWS = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl")


class MetricRow(TypedDict):
    """A row of metrics.jsonl."""

    step: PositiveInt
    tokens: PositiveInt
    loss: NonNegative | None
    learning_rate: NonNegative
    grad_norm: NonNegative | None
    tokens_per_second: NonNegative


class EvaluationRow(TypedDict):
    """A row of evaluations.jsonl."""

    step: Count
    tokens: Count
    test_loss: NonNegative


class _Split(TypedDict):
    tokens: Count
    sha256: Text


class _Corpus(TypedDict):
    train: _Split
    test: _Split


class _OfCorpus(TypedDict):
    corpus: _Corpus


_COLUMNS = {"metrics.jsonl": MetricRow, "evaluations.jsonl": EvaluationRow}


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, existing or to be made."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.exists()

    @property
    def finished(self) -> bool:
        """Whether the run has written its results."""
        return self.summary_file.exists()

    @property
    def config_file(self) -> Path:
        """The configuration."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """The training rows: step, tokens, loss, learning_rate, grad_norm, tokens_per_second.

        A row whose steps made no update has no loss.
        """
        return self.path / "metrics.jsonl"

    @property
    def evaluations_file(self) -> Path:
        """The evaluation rows: step, tokens, test_loss."""
        return self.path / "evaluations.jsonl"

    @property
    def events_file(self) -> Path:
        """The event rows: step, event and what there is to say of it."""
        return self.path / "events.jsonl"

    @cached_property
    def config(self) -> RunConfig:
        """The configuration the run was started with."""
        return RunConfig.load(self.config_file)

    @property
    def metrics(self) -> pd.DataFrame:
        """The training rows."""
        return _table(self.metrics_file)

    @property
    def evaluations(self) -> pd.DataFrame:
        """The evaluation rows."""
        return _table(self.evaluations_file)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event rows."""
        return read_rows(self.events_file)

    @property
    def summary_file(self) -> Path:
        """The results of a finished run; no other has it."""
        return self.path / "summary.json"

    @property
    def summary(self) -> dict[str, Any]:
        """The results of a finished run."""
        return _read_json(self.summary_file)

    @property
    def environment_file(self) -> Path:
        """Where the run ran, and on what."""
        return self.path / "environment.json"

    @property
    def environment(self) -> dict[str, Any]:
        """Where the run ran, and on what."""
        return _read_json(self.environment_file)

    @property
    def corpus(self) -> dict[str, str]:
        """What the run's corpus was: a line a split, with its hash."""
        environment = validated(_OfCorpus, self.environment, self.environment_file)
        return corpus_identity(environment["corpus"])

    @property
    def test_losses(self) -> NDArray[np.float64]:
        """The mean loss of every test block after the last step, nats per token."""
        return np.load(self.path / "test_losses.npy")

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = [
            path for path in self.path.glob("checkpoint-*") if _CHECKPOINT.fullmatch(path.name)
        ]
        return sorted(found, key=step_of)

    @property
    def last_checkpoint(self) -> str:
        """The path of the newest checkpoint, for messages."""
        return str(self.checkpoints[-1]) if self.checkpoints else "none"

    def make(self) -> None:
        """Make the folder, unless it is there.

        Raises:
            ValueError: if it cannot be made, or nothing can be written in it.
        """
        make_writable(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder to this process; the kernel lets go when it ends, however it does.

        Raises:
            ValueError: if another process runs here, or nothing can be written here.
        """
        lock = FileLock(self.path / "lock", timeout=0)
        try:
            with writing(self.path):
                lock.acquire()
        except Timeout:
            holder = Path(lock.lock_file).read_text(encoding="utf-8") or "another process"
            raise ValueError(
                f"{self.path} is in use by {holder}: wait for it, or choose another folder."
            ) from None
        try:
            about = f"process {os.getpid()} on {platform.node()}"
            Path(lock.lock_file).write_text(about, encoding="utf-8")
            yield
        finally:
            lock.release()

    def check_same_config(self, config: RunConfig) -> None:
        """Raise ``ValueError`` if the run was started with another configuration."""
        there, here = self.config.to_dict(), config.to_dict()
        neutral = {name: here[name] for name in RunConfig.neutral_fields()}
        differing = differences({**there, **neutral}, here)
        if differing:
            raise ValueError(
                f"{self.path} holds a run with another configuration ({differing}). "
                "Choose another folder, or the same settings."
            )
        self.check_same_attention()

    def check_same_attention(self) -> None:
        """Raise ``ValueError`` if its variant's name meant another attention at that time."""
        environment = validated(dict[str, Any], self.environment, self.environment_file)
        if "attention" not in environment:  # of an earlier version
            return
        try:
            then = AttentionSpec.from_dict(environment["attention"])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.environment_file}: attention: {error}") from error
        differing = differences(then.to_dict(), self.config.spec.to_dict())
        if differing:
            raise ValueError(
                f"{self.path} holds a run of {self.config.attention!r} as it was defined then "
                f"({differing}). Choose another folder; its attention can be given by such fields."
            )

    def check_same_corpus(self, manifest: dict[str, Any]) -> None:
        """Raise ``ValueError`` if the corpus is not what it was when the run was started."""
        differing = differences(self.corpus, corpus_identity(manifest))
        if differing:
            raise ValueError(
                f"{self.path} holds a run on other text: the corpus {manifest['corpus']!r} has "
                f"changed ({differing}). Choose another folder, or bring the text back."
            )

    def record_session(
        self, session: dict[str, Any], attention: AttentionSpec, manifest: dict[str, Any]
    ) -> None:
        """Write where a session runs; the first one, its attention and corpus stay."""
        record = {**session, "attention": attention.to_dict(), "corpus": manifest}
        if self.exists:
            record = self.environment
            before = record.get("sessions")
            record["sessions"] = [*(before if isinstance(before, list) else []), session]
        write_json(self.environment_file, record)

    def rewind(self, checkpoint: Path | None) -> None:
        """Bring the rows back to what they were at a checkpoint, or to none."""
        for name in _ROWS:
            with file_aside(self.path / name) as aside:
                if checkpoint is None:
                    aside.touch()
                else:
                    shutil.copyfile(checkpoint / name, aside)

    def copy_rows(self, checkpoint: Path) -> None:
        """Put the rows so far into a checkpoint."""
        for name in _ROWS:
            shutil.copyfile(self.path / name, checkpoint / name)

    def add_checkpoint(self, made: Path, keep: int) -> None:
        """Give a checkpoint its name here, and remove all but the newest ``keep`` up to it."""
        new = self.path / made.name
        if new.exists():
            _discard(new)
        made.rename(new)
        sync(self.path)
        upto = [path for path in self.checkpoints if step_of(path) <= step_of(new)]
        for old in upto[:-keep]:
            _discard(old)

    def put_aside(self, name: str) -> str:
        """Give a damaged checkpoint a name under which it counts as none; return it."""
        aside = self.path / f"{name}.damaged"
        if aside.exists():
            _discard(aside)
        (self.path / name).rename(aside)
        return aside.name


def step_of(checkpoint: Path) -> int:
    """The steps that a checkpoint holds."""
    return int(checkpoint.name.partition("-")[2])


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint; if that is cut short, what is left has another name."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old.parts")
    checkpoint.rename(aside)
    shutil.rmtree(aside)


def corpus_identity(manifest: dict[str, Any]) -> dict[str, str]:
    """A line a split of a prepared corpus: its tokens and their hash."""
    return {
        f"{split} split": f"{manifest[split]['tokens']} tokens {manifest[split]['sha256'][:16]}"
        for split in ("train", "test")
    }


def differences(there: dict[str, Any], here: dict[str, Any], now: str = "now") -> str:
    """The values in which two mappings with the same keys differ, as text; empty if in none."""
    return "; ".join(
        f"{key}: {there[key]!r} there, {here[key]!r} {now}"
        for key in there
        if there[key] != here[key]
    )


def _read_json(path: Path) -> Any:
    with _reading(path):
        return json.loads(path.read_text(encoding="utf-8"))


def _table(path: Path) -> pd.DataFrame:
    """The rows of a file in its columns; what else they hold is left out.

    Raises:
        ValueError: naming the line and the column that is not what it must be.
    """
    columns = _COLUMNS[path.name]
    rows = [
        validated(columns, row, f"{path}, line {number}")
        for number, row in enumerate(read_rows(path), start=1)
    ]
    names = list(columns.__annotations__)
    table = pd.DataFrame(rows, columns=names)
    # A column of nulls would stay Python's objects.
    return table.astype({name: float for name in names if name not in ("step", "tokens")})


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    with _reading(path):
        lines = path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1] if line]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of JSON and UTF-8 do not name the file."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row."""
    line = json.dumps(row, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:  # a full disk does not say which
        error.filename = str(path)
        raise
