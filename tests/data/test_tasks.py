"""Synthetic tasks: every label is what a rule derives from the row's ids alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from softmax_rnn.data.mqar import Mqar
from softmax_rnn.data.tasks import TASKS, Task, parse_task

# Text, block size, chance (one over the number of possible answers).
CASES = [
    ("task:mqar", 64, 1 / 64),
    ("task:mqar?pairs=3&vocab=15&filler=zero", 12, 1 / 8),  # the shortest, an odd vocabulary
    ("task:mqar?pairs=4&vocab=10&power=1", 70, 1 / 5),  # all keys
    ("task:mqar?pairs=5&writes=3&filler=zero", 62, 1 / 64),
    ("task:mqar?pairs=4&writes=2&power=0.5", 24, 1 / 64),  # the shortest
    ("task:mqar?settings=16x4,32x3,64x9&vocab=40", 65, 1 / 20),
    ("task:mqar?settings=30x3,30x5&writes=2&filler=zero", 30, 1 / 64),
    ("task:induction", 64, 1 / 16),
    ("task:induction?vocab=2", 4, 1 / 2),  # the shortest
    ("task:induction?vocab=5", 33, 1 / 5),
    ("task:selective_copy", 64, 1 / 16),
    ("task:selective_copy?tokens=3&vocab=2", 7, 1 / 2),  # the shortest
    ("task:selective_copy?tokens=5&vocab=9", 33, 1 / 9),
    ("task:parity", 64, 1 / 2),
    ("task:parity", 33, 1 / 2),
    ("task:parity", 2, 1 / 2),
    ("task:s5", 64, 1 / 120),
    ("task:s5", 31, 1 / 120),
]
each_case = pytest.mark.parametrize(("text", "block_size", "chance"), CASES)
Answers = dict[int, int]  # the answers that a rule gives, by the position of the token before


def recall(ids: list[int], task: Task) -> Answers:
    """The last value of every later token that was a key, at even positions.

    The setting is that of the shortest length, and then of the most pairs, that fits the row.
    """
    assert isinstance(task, Mqar)
    for length, pairs in sorted(task.mixture, key=lambda setting: (setting[0], -setting[1])):
        end, values = 2 * pairs * task.writes, dict[int, int]()
        for t in range(0, end, 2):
            values[ids[t]] = ids[t + 1]
        answers = {t: values[ids[t]] for t in range(end, length, 2) if ids[t] in values}
        keys = len(values) == pairs and all(0 < key < task.vocab // 2 for key in values)
        if keys and {ids[t] for t in answers} == set(values) and not any(ids[length:]):
            return answers
    raise AssertionError(ids)


def induction(ids: list[int], task: Task) -> Answers:
    trigger = task.vocab_size - 1
    assert ids.count(trigger) == 2
    assert ids[-2] == trigger
    return {len(ids) - 2: ids[ids.index(trigger) + 1]}


def selective_copy(ids: list[int], task: Task) -> Answers:
    noise, marker = task.vocab_size - 2, task.vocab_size - 1
    start = ids.index(marker)
    data = [token for token in ids[:start] if token != noise]
    assert ids[start:] == [marker] * (len(data) + 1)
    return {start + i: token for i, token in enumerate(data)}


def parity(ids: list[int], task: Task) -> Answers:
    return {t: sum(ids[: t + 1]) % 2 for t in range(len(ids) - 1)}


def s5(ids: list[int], task: Task) -> Answers:
    elements = list(permutations(range(5)))
    answers, things = {}, [0, 1, 2, 3, 4]
    for t, token in enumerate(ids[:-1]):
        things = [elements[token][x] for x in things]
        answers[t] = elements.index(tuple(things))
    return answers


RULES: dict[str, Callable[[list[int], Task], Answers]] = {
    "mqar": recall,
    "induction": induction,
    "selective_copy": selective_copy,
    "parity": parity,
    "s5": s5,
}


def given_answers(labels: NDArray[np.int64]) -> list[Answers]:
    """The labels that are not -100, by the position of the token before."""
    assert (labels[:, 0] == -100).all()
    return [{int(t) - 1: int(row[t]) for t in np.flatnonzero(row != -100)} for row in labels]


@each_case
def test_a_rule_finds_every_answer_from_the_ids(text: str, block_size: int, chance: float) -> None:
    task, positions = parse_task(text, block_size), np.arange(200)
    ids, labels = task.draw(3, positions)
    assert ids.shape == labels.shape == (200, block_size)
    assert ids.dtype == labels.dtype == np.int64
    assert ids.min() >= 0
    assert max(ids.max(), labels.max()) < task.vocab_size
    assert set(labels[labels < 0]) == {-100}
    answers = given_answers(labels)
    assert task.predicted(3, positions).tolist() == [len(row) for row in answers]
    assert task.predicted(3, positions).dtype == np.int64
    for row, expected in zip(ids.tolist(), answers, strict=True):
        found = RULES[task.name](row, task)
        if task.name == "mqar" and "filler=zero" not in text:  # fillers may look like questions
            found = {t: found[t] for t in expected}
        assert found == expected


@each_case
def test_answers_of_other_rows_are_right_by_chance(
    text: str, block_size: int, chance: float
) -> None:
    """Also the share of each answer: none is likelier than the others."""
    task = parse_task(text, block_size)
    labels = task.draw(4, np.arange(4000))[1]
    rows = [list(answers.values()) for answers in given_answers(labels)]
    same = [
        a == b
        for mine, other in zip(rows[::2], rows[1::2], strict=True)
        for a, b in zip(mine, other, strict=False)  # settings differ in their number of answers
    ]
    assert stats.binomtest(sum(same), len(same), chance).pvalue > 1e-3
    firsts = np.unique([row[0] for row in rows], return_counts=True)[1]
    assert len(firsts) == round(1 / chance)
    assert stats.chisquare(firsts).pvalue > 1e-3


@given(
    st.sampled_from(CASES),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=9, unique=True),
    st.randoms(use_true_random=False),
)
def test_rows_depend_on_seed_and_position_alone(case, seed, positions, random) -> None:  # type: ignore[no-untyped-def]
    task = parse_task(*case[:2])
    together = np.stack(task.draw(seed, np.array(positions)), axis=1)
    for i, position in enumerate(positions):
        alone = np.stack(task.draw(seed, np.array([position])), axis=1)[0]
        assert np.array_equal(alone, together[i])
    order = random.sample(range(len(positions)), len(positions))
    np.random.seed(seed % 7)  # noqa: NPY002 - the global state must not matter
    again = np.stack(task.draw(seed, np.array(positions)[order]), axis=1)
    assert np.array_equal(again, together[order])
    counts = task.predicted(seed, np.array(positions))
    assert np.array_equal(counts, (together[:, 1] != -100).sum(axis=1))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("task:mqar?pairs=2&vocab=12&writes=2", [1, 7, 1, 10, 3, 11, 3, 8, 3, 3, 1, 10]),
        ("task:induction", [4, 15, 12, 0, 16, 13, 16, 0]),
        ("task:selective_copy?tokens=2", [4, 16, 15, 16, 16, 17, 17, 17]),
        ("task:parity", [0, 1, 0, 0, 1, 1, 1, 0]),
        ("task:s5", [60, 103, 116, 40, 103, 85]),
    ],
)
def test_rows_are_the_same_in_every_version(text: str, ids: list[int]) -> None:
    """Runs of different versions, and on different machines, can be compared."""
    assert parse_task(text, len(ids)).draw(7, np.array([123456789]))[0].tolist() == [ids]


@pytest.mark.parametrize("name", TASKS)
def test_no_row_at_all(name: str) -> None:
    task, none = parse_task(f"task:{name}", 66), np.arange(0)
    assert [x.shape for x in task.draw(0, none)] == [(0, 66), (0, 66)]
    assert task.predicted(0, none).shape == (0,)


@pytest.mark.parametrize(
    "text",
    [
        *(f"task:{name}" for name in TASKS if name != "digits"),  # whose images are repeated
        "task:mqar?filler=zero",
        "task:mqar?pairs=4&writes=4",
        "task:mqar?settings=32x4,64x8&filler=zero",
    ],
)
def test_no_row_is_drawn_twice_for_training_and_testing(text: str) -> None:
    task = parse_task(text, 64)
    train, test = (task.draw(seed, np.arange(5000))[0] for seed in (0, 1))
    assert len(np.unique(np.concatenate([train, test]), axis=0)) == 10_000


def test_drawn_without_replacement() -> None:
    """All ordered choices of 3 keys of 4 are equally likely; so are those of values."""
    ids, _ = parse_task("task:mqar?pairs=3&vocab=10&filler=zero", 12).draw(0, np.arange(24_000))
    for start, smallest, size in ((0, 1, 4), (1, 5, 5)):
        drawn = ids[:, start:6:2]
        assert drawn.min() == smallest
        assert drawn.max() == smallest + size - 1
        choices, counts = np.unique(drawn, axis=0, return_counts=True)
        assert len(choices) == len(list(permutations(range(size), 3)))
        assert stats.chisquare(counts).pvalue > 1e-3


def test_places_of_copied_and_triggering_tokens_are_uniform() -> None:
    ids, _ = parse_task("task:selective_copy?tokens=2", 9).draw(0, np.arange(15_000))
    patterns, counts = np.unique(ids[:, :6] < 16, axis=0, return_counts=True)
    assert len(patterns) == 15
    assert stats.chisquare(counts).pvalue > 1e-3
    ids, _ = parse_task("task:induction", 13).draw(0, np.arange(10_000))
    counts = np.bincount(np.argmax(ids == 16, axis=1))
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_last_token_does_not_tell_the_answer() -> None:
    ids, labels = parse_task("task:induction", 16).draw(0, np.arange(16_000))
    assert stats.binomtest(int((ids[:, -1] == labels[:, -1]).sum()), 16_000, 1 / 16).pvalue > 1e-3


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("task:mqar", "task:mqar?pairs=16"),
        ("task:mqar?vocab=128&pairs=16", "task:mqar?pairs=16"),
        ("task:mqar?power=1&pairs=4", "task:mqar?pairs=4&power=1.0"),
        ("task:mqar?power=1e-2&pairs=04", "task:mqar?pairs=4"),
        ("task:mqar?settings=64x8,32x4", "task:mqar?settings=32x4,64x8"),
        ("task:mqar?writes=2&filler=zero&pairs=8", "task:mqar?pairs=8&filler=zero&writes=2"),
        ("task:induction?vocab=16", "task:induction"),
        ("task:selective_copy?vocab=4&tokens=2", "task:selective_copy?tokens=2&vocab=4"),
    ],
)
def test_a_task_has_one_name(text: str, name: str) -> None:
    task = parse_task(text, 64)
    assert str(task) == name
    again = parse_task(name, 64)
    assert again == task
    assert hash(again) == hash(task)
    positions = np.arange(20)
    assert np.array_equal(task.draw(0, positions), again.draw(0, positions))


def test_tasks_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_task("task:parity", 64).block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "block_size", "message"),
    [
        ("mqar", 64, "A task is written task:NAME?option=value, not 'mqar'."),
        (
            "task:mqr",
            64,
            "Unknown task 'mqr'. Did you mean 'mqar'? "
            "Allowed: mqar, induction, selective_copy, parity, s5, listops, digits.",
        ),
        (
            "task:mqar?pair=3",
            64,
            "Unknown option of task:mqar: 'pair'. Did you mean 'pairs'? "
            "Allowed: pairs, vocab, power, filler, writes, settings, test.",
        ),
        ("task:mqar?block_size=3", 64, "Unknown option of task:mqar: 'block_size'."),
        ("task:mqar?", 64, "task:mqar: an option is written option=value, not ''."),
        ("task:mqar?pairs", 64, "task:mqar: an option is written option=value, not 'pairs'."),
        ("task:mqar?pairs=2&pairs=3", 64, "task:mqar: the option pairs is given twice."),
        ("task:parity?vocab=3", 64, "task:parity has no options, but 'vocab=3' is given."),
        ("task:mqar?pairs=0", 64, "task:mqar: pairs must be greater than or equal to 1, not 0."),
        ("task:mqar?pairs=2.5", 64, "task:mqar: pairs must be a valid integer, not 2.5."),
        ("task:mqar?pairs=", 64, "task:mqar: pairs must be a valid integer, not ''."),
        ("task:mqar?pairs=" + "9" * 5000, 64, "task:mqar: pairs must be a valid integer, not inf."),
        ("task:mqar?writes=0", 64, "task:mqar: writes must be greater than or equal to 1, not 0."),
        ("task:mqar?power=0", 64, "task:mqar: power must be greater than 0, not 0."),
        ("task:mqar?power=nan", 64, "task:mqar: power must be a finite number, not nan."),
        (
            "task:mqar?filler=rand",
            64,
            "task:mqar: Unknown filler 'rand'. Did you mean 'random'? Allowed: random, zero.",
        ),
        (
            "task:mqar?pairs=3&settings=64x4",
            64,
            "task:mqar: settings=64x4 gives the pairs; leave out pairs=3.",
        ),
        (
            "task:mqar?settings=64x",
            64,
            "task:mqar: settings must be lengths and pairs such as 64x4,128x8, not '64x'.",
        ),
        ("task:mqar?test=", 64, "task:mqar: test must be lengths and pairs such as"),
        (f"task:mqar?test={'9' * 5000}x4", 64, "task:mqar: test must be lengths and pairs such as"),
        ("task:mqar?pairs=1_6", 64, "task:mqar: pairs must be a valid integer, not '1_6'."),
        ("task:mqar?pairs= 16", 64, "task:mqar: pairs must be a valid integer, not ' 16'."),
        ("task:mqar?pairs=\u0661", 64, "task:mqar: pairs must be a valid integer, not "),
        ("task:mqar?settings=64x4,", 64, "task:mqar: settings must be lengths and pairs such as"),
        ("task:mqar?settings=64x0", 64, "task:mqar: settings must be lengths and pairs such as"),
        ("task:mqar?pairs=4", 63, "task:mqar: block_size must be even, not 63: keys and questions"),
        (
            "task:mqar?settings=16x2,31x2",
            64,
            "task:mqar: the length of 31x2 must be even, not 31: keys and questions are at even",
        ),
        (
            "task:mqar?settings=64x4,128x8",
            64,
            "task:mqar: the length of 128x8 must be at most block_size=64.",
        ),
        (
            "task:mqar?pairs=16",
            62,
            "task:mqar: block_size must be at least 64, not 62: a row holds 16 pairs and 16 "
            "questions, of 2 tokens each.",
        ),
        (
            "task:mqar?settings=64x8&writes=4",
            64,
            "task:mqar: the length of 64x8 must be at least 80, not 64: a row holds 32 pairs and 8",
        ),
        (
            "task:mqar?vocab=33",
            64,
            "task:mqar: vocab=33 has 15 keys and 17 values, but a row needs 16 keys and 16 values.",
        ),
        (
            "task:mqar?pairs=4&writes=4&vocab=20",
            64,
            "task:mqar: vocab=20 has 9 keys and 10 values, but a row needs 4 keys and 16 values.",
        ),
        ("task:mqar?vocab=1", 64, "task:mqar: vocab=1 has 0 keys and 1 values"),
        (
            "task:induction?vocab=1",
            64,
            "task:induction: vocab must be greater than or equal to 2, not 1.",
        ),
        (
            "task:induction",
            3,
            "task:induction: block_size must be at least 4, not 3: a row holds the trigger, a "
            "token, the trigger and a last token.",
        ),
        (
            "task:selective_copy",
            16,
            "task:selective_copy: block_size must be at least 17, not 16: a row holds tokens=8, as "
            "many markers and a last one.",
        ),
        (
            "task:selective_copy?tokens=0",
            16,
            "task:selective_copy: tokens must be greater than or equal to 1, not 0.",
        ),
        ("task:parity", 1, "task:parity: block_size must be greater than or equal to 2, not 1."),
        ("task:s5", 1, "task:s5: block_size must be greater than or equal to 2, not 1."),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(
    text: str, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        parse_task(text, block_size)
    assert str(error.value).startswith(message)


def test_the_test_split_may_have_longer_rows() -> None:
    task = parse_task("task:mqar?settings=16x2,32x4&test=32x4,64x8", 32)
    longer = task.for_testing()
    assert longer == parse_task("task:mqar?settings=32x4,64x8", 64)
    assert longer.draw(0, np.arange(3))[0].shape == (3, 64)
    assert parse_task("task:mqar?pairs=2&test=16x4", 8).for_testing().block_size == 16
    assert parse_task("task:parity", 8).for_testing() == parse_task("task:parity", 8)
    with pytest.raises(ValueError, match="must be at least 32, not 16"):
        parse_task("task:mqar?test=16x8", 64)
    with pytest.raises(ValueError, match="lengths and pairs such as"):
        parse_task("task:mqar?test=16,8", 64)
