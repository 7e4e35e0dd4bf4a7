"""Tasks that ask once, at the end, and hidden tokens of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from softmax_rnn.data import (
    MaskedBlocks,
    TaskRows,
    TokenBlocks,
    load_tokenizer,
    parse_task,
    prepare,
)

VALUES = {
    10: max,
    11: min,
    12: lambda x: sorted(x)[(len(x) + 1) // 2 - 1],
    13: lambda x: sum(x) % 10,
}


def value(tokens: list[int]) -> int:
    """The value of a list, with a stack; the deepest list it has must be of this depth at most."""
    stack: list[list[int]] = [[]]
    for token in tokens:
        if token in VALUES:
            stack.append([token])
        elif token == 14:
            operator, *values = stack.pop()
            stack[-1].append(VALUES[operator](values))
        else:
            stack[-1].append(token)
        assert len(stack) <= 4
    ((found,),) = stack
    return found


@pytest.mark.parametrize("block_size", [5, 9, 66])
def test_listops_answers_are_the_values_of_lists(block_size: int) -> None:
    ids, labels = parse_task("task:listops", block_size).draw(3, np.arange(200))
    assert (ids[:, -2:] == 15).all()
    assert (labels[:, :-1] == -100).all()
    found = [value(row) for row in ids[:, :-2].tolist()]
    assert labels[:, -1].tolist() == found
    # Another operator of the same digits has other values.
    swapped = np.where(ids == 10, 11, np.where(ids == 11, 10, ids))[:, :-2]
    assert block_size == 5 or [value(row) for row in swapped.tolist()] != found


def test_listops_rows_differ_and_no_answer_is_much_likelier() -> None:
    task = parse_task("task:listops", 66)
    train, test = (task.draw(seed, np.arange(2000)) for seed in (0, 1))
    assert len(np.unique(np.concatenate([train[0], test[0]]), axis=0)) == 4000
    assert np.bincount(train[1][:, -1]).max() < 400
    assert set(np.unique(train[0])) == set(range(16))


def test_listops_rows_are_the_same_in_every_version() -> None:
    ids, labels = parse_task("task:listops", 14).draw(7, np.array([123456789]))
    assert (ids.tolist(), labels[0, -1]) == ([[10, 0, 3, 11, 1, 6, 6, 7, 6, 14, 6, 14, 15, 15]], 6)


def test_digits_are_images_with_their_digits_and_every_split_has_its_own() -> None:
    task = parse_task("task:digits", 66)
    known = {row.tobytes(): digit for row, digit in zip(*load_digits(return_X_y=True), strict=True)}
    seen = {}
    for split in ("train", "test", "validation"):
        part = task if split == "train" else task.for_testing(split)
        rows = TaskRows(part, split, 0)
        ids, labels = rows.arrays(0, np.arange(512))
        images = [row.astype(float).tobytes() for row in ids[:, :64]]
        assert labels[:, -1].tolist() == [known[image] for image in images]
        assert (ids[:, 64:] == 17).all()
        seen[split] = set(images)
    assert len(seen["test"]) > 500  # a few images of the 1,797 are equal
    assert len(seen["test"] & seen["train"]) < 5
    assert len(seen["validation"] & (seen["train"] | seen["test"])) < 5
    with pytest.raises(ValueError, match=r"block_size must be 66, not 64"):
        parse_task("task:digits", 64)


def test_answers_of_an_encoder_are_in_the_place_of_the_question() -> None:
    task = parse_task("task:selective_copy?tokens=2&vocab=4", 8)
    ids, labels = TaskRows(task, "test", 0).arrays(0, np.arange(50))
    same, moved = TaskRows(task, "test", 0, causal=False).arrays(0, np.arange(50))
    assert np.array_equal(same, ids)
    assert np.array_equal(moved[:, :-1], labels[:, 1:])
    assert (moved[:, -1] == -100).all()
    assert (ids[moved != -100] == 5).all()  # the markers


def test_hidden_tokens_alone_are_predicted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(chr(97 + i * i % 26) for i in range(4000)))
    corpus = prepare(str(tmp_path), load_tokenizer("bytes"), test_fraction=0.3, cache=tmp_path)
    rows, plain = (kind(corpus, "train", 40) for kind in (MaskedBlocks, TokenBlocks))
    epochs = [rows.drawn_rows(1, start, start + len(rows)) for start in (0, len(rows))]
    again = MaskedBlocks(corpus, "train", 40).drawn_rows(1, 3, 4)[0]
    assert all(np.array_equal(again[name], epochs[0][3][name]) for name in again)
    hidden = []
    for epoch, found in enumerate(epochs):
        for place, row in enumerate(found):
            ids = plain[rows.drawn(1, epoch * len(rows) + place)]["input_ids"]
            at = row["labels"] != -100
            assert at.sum() == 6 == rows.predicted(1, 0, 1)
            assert (row["labels"][at] == ids[at]).all()
            assert (row["input_ids"] == ids.masked_fill(at, 257)).all()
            hidden.append((rows.drawn(1, epoch * len(rows) + place), at.numpy().tobytes()))
    assert len(set(hidden)) == len(hidden)  # a block has others in each epoch
    test = MaskedBlocks(corpus, "test", 40)
    assert all(np.array_equal(test[0][name], test[0][name]) for name in test[0])
