"""Rows of a task as training and testing read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from softmax_rnn.data import TaskCorpus, TaskRows, is_task, parse_task, task_tokenizer
from softmax_rnn.data.task_rows import TEST_ROWS

TASK = parse_task("task:mqar?settings=16x2,32x4&vocab=32", 32)


def test_rows_depend_on_split_seed_and_position_alone() -> None:
    rows = TaskRows(TASK, "train", 3)
    together = rows.drawn_rows(3, 5, 12)
    for position, row in enumerate(together, start=5):
        for name, tensor in rows[rows.drawn(3, position)].items():
            assert torch.equal(row[name], tensor)
    for other in (TaskRows(TASK, "train", 4), TaskRows(TASK, "test", 3)):
        assert not torch.equal(other[5]["input_ids"], together[0]["input_ids"])
    with pytest.raises(ValueError, match="drawn with seed 3, not 4"):
        rows.drawn_rows(4, 0, 1)


def test_counts_are_those_of_the_rows() -> None:
    rows = TaskRows(TASK, "train", 0)
    labels = torch.stack([row["labels"] for row in rows.drawn_rows(0, 10, 50)])
    assert rows.predicted(0, 10, 50) == int((labels != -100).sum())
    assert len(np.unique((labels != -100).sum(1))) == 2  # both settings
    assert rows.drawn_tokens(0, 10, 50) == 40 * 32


def test_lengths_are_those_without_padding() -> None:
    rows, numbers = TaskRows(TASK, "test", 0), np.arange(40)
    asked = [int((rows[number]["labels"] != -100).sum()) for number in numbers]
    expected = [{2: 16, 4: 32}[count] for count in asked]
    assert rows.lengths(numbers).tolist() == expected
    assert len(set(expected)) == 2
    whole = TaskRows(parse_task("task:parity", 12), "train", 0)
    assert whole.lengths(numbers[:3]).tolist() == [12, 12, 12]


def test_the_test_split_has_an_end() -> None:
    rows = TaskRows(TASK, "test", 0)
    assert len(rows) == TEST_ROWS
    for index in (TEST_ROWS, -1):
        with pytest.raises(IndexError):
            rows[index]


def test_a_corpus_is_told_apart_by_what_is_drawn() -> None:
    def manifest(text: str, seed: int = 0) -> dict[str, object]:
        task = parse_task(text, 32)
        return TaskCorpus.of(task, TaskRows(task.for_testing(), "test", seed)).manifest

    plain = manifest("task:mqar?pairs=4&vocab=32")
    assert plain == manifest("task:mqar?vocab=32&pairs=4")
    assert plain["vocab_size"] == 32
    assert plain["end_of_text"] is None
    assert plain["train"] == manifest("task:mqar?pairs=4&vocab=32", 1)["train"]
    assert plain["test"] != manifest("task:mqar?pairs=4&vocab=32", 1)["test"]
    for other in ("task:mqar?pairs=5&vocab=32", "task:mqar?pairs=4&vocab=32&filler=zero"):
        assert manifest(other)["train"] != plain["train"]


def test_ids_are_words() -> None:
    tokenizer = task_tokenizer(32)
    assert tokenizer("3 31 0")["input_ids"] == [3, 31, 0]
    assert tokenizer.decode([3, 31, 0]) == "3 31 0"
    assert is_task("task:parity")
    assert not is_task("tasks/parity.txt")
