"""The folder of one run: what is in it, and reading it back.

config.yaml          the resolved configuration
environment.json     versions, commit, machine, corpus; those of later sessions under `sessions`
metrics.jsonl        a row a logged step
evaluations.jsonl    a row an evaluation
checkpoint-N/        complete ones only: they are written aside and renamed
test_losses.npy      the loss of every test block after the last step
summary.json         the results; its presence means that the run is finished
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from softmax_rnn.files import write_json, write_text
from softmax_rnn.training.config import RunConfig

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


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
        return (self.path / "summary.json").exists()

    @property
    def config_file(self) -> Path:
        """The configuration."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """The training rows: step, tokens, loss, learning_rate, grad_norm, tokens_per_second."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations_file(self) -> Path:
        """The evaluation rows: step, tokens, test_loss."""
        return self.path / "evaluations.jsonl"

    @cached_property
    def config(self) -> RunConfig:
        """The configuration the run was started with."""
        return RunConfig.load(self.config_file)

    @property
    def metrics(self) -> pd.DataFrame:
        """The training rows."""
        return pd.DataFrame(read_rows(self.metrics_file))

    @property
    def evaluations(self) -> pd.DataFrame:
        """The evaluation rows."""
        return pd.DataFrame(read_rows(self.evaluations_file))

    @property
    def summary(self) -> dict[str, Any]:
        """The results of a finished run."""
        return json.loads((self.path / "summary.json").read_text(encoding="utf-8"))

    @property
    def environment_file(self) -> Path:
        """Where the run ran, and on what."""
        return self.path / "environment.json"

    @property
    def environment(self) -> dict[str, Any]:
        """Where the run ran, and on what."""
        return json.loads(self.environment_file.read_text(encoding="utf-8"))

    @property
    def corpus(self) -> dict[str, str]:
        """What the run's corpus was: a line a split, with its hash."""
        return corpus_identity(self.environment["corpus"])

    @property
    def test_losses(self) -> NDArray[np.float64]:
        """The mean loss of every test block after the last step, nats per token."""
        return np.load(self.path / "test_losses.npy")

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = {
            int(match[1]): path
            for path in self.path.glob("checkpoint-*")
            if (match := _CHECKPOINT.fullmatch(path.name))
        }
        return [found[step] for step in sorted(found)]

    def check_same_config(self, config: RunConfig) -> None:
        """Raise ``ValueError`` if the run was started with another configuration."""
        differing = differences(self.config.to_dict(), config.to_dict())
        if differing:
            raise ValueError(
                f"{self.path} holds a run with another configuration ({differing}). "
                "Choose another folder, or the same settings."
            )

    def check_same_corpus(self, manifest: dict[str, Any]) -> None:
        """Raise ``ValueError`` if the corpus is not what it was when the run was started."""
        differing = differences(self.corpus, corpus_identity(manifest))
        if differing:
            raise ValueError(
                f"{self.path} holds a run on other text: the corpus {manifest['corpus']!r} has "
                f"changed ({differing}). Choose another folder, or bring the text back."
            )

    def record_session(self, session: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Write where a session runs: the first one and its corpus stay, later ones are listed."""
        record = {**session, "corpus": manifest}
        if self.exists:
            record = self.environment
            record.setdefault("sessions", []).append(session)
        write_json(self.environment_file, record)

    def rewind(self, step: int) -> None:
        """Drop the rows after ``step``, as a run that resumes there writes them again."""
        for path in (self.metrics_file, self.evaluations_file):
            rows = [row for row in read_rows(path) if row["step"] <= step]
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
