"""The folder of one run: its files and their readers.

config.yaml          the resolved configuration
environment.json     versions, commit, machine, full attention spec, corpus; under `sessions` the
                     versions, commit and machine of later sessions
metrics.jsonl        a row for each logged step
evaluations.jsonl    a row for each evaluation
events.jsonl         a row for each step without update, for each loss spike, and for the end of a
                     run that diverged
checkpoint-N/        a complete checkpoint, with hashes and the rows so far
lock                 held by the process that writes here
test_losses.npy      the loss of every test block after the last step
test_errors.npy      the share of wrong predictions in every test block after the last step
summary.json         the results; only a finished run has it
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import (
    Any,
    NotRequired,  # pydantic needs this one before Python 3.12
)

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from typing_extensions import TypedDict

from softmax_rnn._utils.errors import differences
from softmax_rnn._utils.files import file_aside, sync, write_json, writing
from softmax_rnn._utils.validation import Count, NonNegative, PositiveInt, Share, Text, validated
from softmax_rnn.ops import AttentionSpec, LayerOptions, Variant
from softmax_rnn.training.config import RunConfig, TrainingConfig, load_config

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ROWS = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl")


class _MetricRow(TypedDict):
    step: PositiveInt
    tokens: PositiveInt
    loss: NonNegative | None
    learning_rate: NonNegative
    grad_norm: NonNegative | None
    tokens_per_second: NonNegative


class _EvaluationRow(TypedDict):
    step: Count
    tokens: Count
    test_loss: NonNegative
    test_accuracy: NotRequired[Share]  # earlier versions did not write it


class _Split(TypedDict):
    tokens: Count
    sha256: Text


class _Corpus(TypedDict):
    train: _Split
    test: _Split


class RunFolder:
    """A run's folder, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.environment_file = path / "environment.json"
        self.summary_file = path / "summary.json"
        self.metrics_file, self.evaluations_file, self.events_file = (path / name for name in _ROWS)

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.exists()

    @property
    def finished(self) -> bool:
        """Whether the run has written its results."""
        return self.summary_file.exists()

    @property
    def diverged(self) -> bool:
        """Whether the run has ended, unfinished, with a loss or gradient that is not finite."""
        ends = (row["event"] == "diverged" for row in self.events)
        return self.exists and not self.finished and any(ends)

    @cached_property
    def config(self) -> TrainingConfig:
        """The configuration the run was started with."""
        return load_config(self.config_file)

    @property
    def new_model(self) -> RunConfig:
        """The configuration of a run that trains a new model; ``ValueError`` for a conversion."""
        config = self.config
        if not isinstance(config, RunConfig):
            raise ValueError(f"{self.path} converts a pretrained model; it cannot be compared.")
        return config

    @property
    def metrics(self) -> pd.DataFrame:
        """The training rows; a row whose steps made no update has no loss."""
        return _table(self.metrics_file, _MetricRow)

    @property
    def evaluations(self) -> pd.DataFrame:
        """The evaluation rows."""
        return _table(self.evaluations_file, _EvaluationRow)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event rows: step, event, and its details."""
        return read_rows(self.events_file)

    @property
    def summary(self) -> dict[str, Any]:
        """The results of a finished run."""
        return _read(self.summary_file, json.loads)

    @property
    def environment(self) -> dict[str, Any]:
        """The run's environment, attention and corpus."""
        found = _read(self.environment_file, json.loads)
        return validated(dict[str, Any], found, self.environment_file)

    @property
    def corpus(self) -> dict[str, str]:
        """The run's corpus: the number of tokens and the hash of each split."""
        corpus = self.environment.get("corpus")
        return corpus_identity(validated(_Corpus, corpus, f"{self.environment_file}: corpus"))

    @property
    def test_losses(self) -> NDArray[np.float64]:
        """The mean loss of every test block after the last step, nats per token."""
        return np.load(self.path / "test_losses.npy")

    @property
    def test_errors(self) -> NDArray[np.float64]:
        """The share of wrong predictions in every test block after the last step."""
        return np.load(self.path / "test_errors.npy")

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = self.path.glob("checkpoint-*")
        return sorted((path for path in found if _CHECKPOINT.fullmatch(path.name)), key=step_of)

    @property
    def last_checkpoint(self) -> str:
        """The path of the newest checkpoint, for messages."""
        return str(self.checkpoints[-1]) if self.checkpoints else "none"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder until the block or the process ends, even if killed.

        Raises:
            ValueError: if another process holds the lock, or nothing can be written here.
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

    def check_same_config(self, config: TrainingConfig) -> None:
        """Raise ``ValueError`` if the run was started with another configuration.

        The fields of an attention may be partly given: those left out have their defaults.
        """
        there, here = _complete(self.config), _complete(config)
        neutral = {name: here[name] for name in TrainingConfig.neutral_fields()}
        what, advice = "with another configuration", ", or the same settings"
        self._require_equal({**there, **neutral}, here, what, advice)
        self.check_same_attention()

    def check_same_attention(self) -> None:
        """Raise ``ValueError`` if the variant's name had another spec when the run started."""
        environment = self.environment
        if "attention" not in environment:  # written by an earlier version
            return
        try:
            spec = AttentionSpec.from_dict(environment["attention"])
            then = Variant(spec, LayerOptions.from_dict(environment.get("layer", {})))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.environment_file}: attention: {error}") from error
        what = f"of {self.config.attention!r} as it was defined then"
        advice = "; these fields give its attention"
        now = self.config.variant
        self._require_equal(then.spec.to_dict(), now.spec.to_dict(), what, advice)
        self._require_equal(then.options.to_dict(), now.options.to_dict(), what, advice)

    def check_same_corpus(self, manifest: dict[str, Any]) -> None:
        """Raise ``ValueError`` if the corpus is not what it was when the run was started."""
        what = f"on other text: the corpus {manifest['corpus']!r} has changed"
        advice = ", or restore the text"
        self._require_equal(self.corpus, corpus_identity(manifest), what, advice)

    def _require_equal(
        self, there: dict[str, Any], here: dict[str, Any], what: str, advice: str
    ) -> None:
        if differing := differences(there, here):
            raise ValueError(
                f"{self.path} holds a run {what} ({differing}). Choose another folder{advice}."
            )

    def check_same_source(self, source: str | None) -> None:
        """Raise ``ValueError`` if the pretrained model is not what it was when the run started."""
        there, here = self.environment.get("source"), source
        what = "of another pretrained model: its weights have changed"
        advice = ", or restore the model"
        self._require_equal({"SHA-256": there}, {"SHA-256": here}, what, advice)

    def record_session(
        self,
        session: dict[str, Any],
        attention: Variant,
        manifest: dict[str, Any],
        source: str | None = None,
    ) -> None:
        """Write the environment of a session; the first one also records attention and corpus.

        ``source`` is the hash of a pretrained model's weights.
        """
        fields: dict[str, Any] = {
            "attention": attention.spec.to_dict(),
            "layer": attention.options.to_dict(),
        }
        if source is not None:
            fields["source"] = source
        record = {**session, **fields, "corpus": manifest}
        if self.exists:
            record = self.environment
            before = record.get("sessions")
            record["sessions"] = [*(before if isinstance(before, list) else []), session]
        write_json(self.environment_file, record)

    def rewind(self, checkpoint: Path | None) -> None:
        """Restore the rows of a checkpoint; None for no rows."""
        for name in _ROWS:
            with file_aside(self.path / name) as aside:
                if checkpoint is None:
                    aside.touch()
                else:
                    shutil.copyfile(checkpoint / name, aside)

    def copy_rows(self, checkpoint: Path) -> None:
        """Copy the rows so far into a checkpoint."""
        for name in _ROWS:
            shutil.copyfile(self.path / name, checkpoint / name)

    def add_checkpoint(self, written: Path, keep: int) -> None:
        """Move a checkpoint here; of those up to it, remove all but the newest ``keep``."""
        new = self.path / written.name
        if new.exists():
            _discard(new)
        written.rename(new)
        sync(self.path)
        candidates = [path for path in self.checkpoints if step_of(path) <= step_of(new)]
        for old in candidates[:-keep]:
            _discard(old)

    def rename_damaged(self, name: str) -> str:
        """Rename a damaged checkpoint, so that it is not used; return its new name."""
        damaged = self.path / f"{name}.damaged"
        if damaged.exists():
            _discard(damaged)
        (self.path / name).rename(damaged)
        return damaged.name


def step_of(checkpoint: Path) -> int:
    """The number of steps before a checkpoint."""
    return int(checkpoint.name.partition("-")[2])


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint; rename it first, since the removal may be interrupted."""
    temporary = checkpoint.with_name(f".{checkpoint.name}.old.parts")
    checkpoint.rename(temporary)
    shutil.rmtree(temporary)


def corpus_identity(manifest: dict[str, Any]) -> dict[str, str]:
    """The number of tokens and their hash, for each split of a prepared corpus."""
    return {
        f"{split} split": f"{manifest[split]['tokens']} tokens {manifest[split]['sha256'][:16]}"
        for split in ("train", "test")
    }


def _complete(config: TrainingConfig) -> dict[str, Any]:
    """The settings, with every field of an attention that is not a variant's name."""
    fields = config.to_dict()
    if not isinstance(config.attention, str):
        fields["attention"] = {**config.attention, **config.spec.to_dict()}
    return {**fields, "layer": config.variant.options.to_dict()}


def _table(path: Path, columns: Any) -> pd.DataFrame:
    """These columns of a file's rows; ``ValueError`` names an invalid line and column."""
    rows = [
        validated(columns, row, f"{path}, line {number}")
        for number, row in enumerate(read_rows(path), start=1)
    ]
    names = list(columns.__annotations__)
    table = pd.DataFrame(rows, columns=names)
    # pandas stores a column of only nulls, or of large integers, as Python objects.
    return table.astype({name: float for name in names if name not in ("step", "tokens")})


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; an unfinished last line is left out."""
    if not path.exists():
        return []
    return _read(path, lambda text: [json.loads(line) for line in text.split("\n")[:-1] if line])


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the error does not name the file
        raise ValueError(f"{path} cannot be read: {error}") from error


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row."""
    line = json.dumps(row, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:  # the error of a full disk names no file
        error.filename = str(path)
        raise
