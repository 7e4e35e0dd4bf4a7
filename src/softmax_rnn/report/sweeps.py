"""What a sweep tried and chose for the runs of a folder, in its file sweep.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from softmax_rnn._utils.files import write_json
from softmax_rnn._utils.validation import Count, NonNegative, Share, Text, validated

FILE = "sweep.json"


class Trial(TypedDict):
    """One trial run; what it measured is missing if it failed.

    Its losses are of validation documents. ``value`` is that of the setting.
    """

    variant: Text
    value: Any
    loss: NonNegative | None
    accuracy: Share | None
    steps: Count | None


class SweepRecord(TypedDict):
    """What was tried, and the value that each variant of the folder's runs has."""

    setting: Text
    chosen: dict[Text, Any]
    trials: list[Trial]


def read_sweep(folder: Path) -> SweepRecord | None:
    """The record in the folder of several runs; ``None`` if their settings were not chosen.

    Raises:
        ValueError: if the file is damaged; the message names it.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    record: SweepRecord = validated(SweepRecord, found, path)
    return record


def add_to_sweep(folder: Path, record: SweepRecord) -> None:
    """Write the record of a figure, which replaces what an earlier one says of its variants."""
    before = read_sweep(folder) or {"setting": record["setting"], "chosen": {}, "trials": []}
    tried = {trial["variant"] for trial in record["trials"]}
    others = [trial for trial in before["trials"] if trial["variant"] not in tried]
    folder.mkdir(parents=True, exist_ok=True)
    chosen, trials = {**before["chosen"], **record["chosen"]}, [*others, *record["trials"]]
    write_json(folder / FILE, {"setting": record["setting"], "chosen": chosen, "trials": trials})
