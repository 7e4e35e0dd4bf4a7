"""Texts of tasks, mistyped in every way: rows that are right, or an error in words."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import outcome
from softmax_rnn.data import TaskCorpus, TaskRows, parse_task
from softmax_rnn.data.rows import IGNORED
from softmax_rnn.data.tasks import TASKS

_OPTIONS = sorted({option for task in TASKS.values() for option in task.options()} | {"x", ""})
_VALUES = st.sampled_from(
    [
        *("0", "1", "2", "4", "16", "128", "-1", "1.5", "1e-9", "nan", "inf", "1_0", " 4", "4 "),
        *("9" * 400, "true", "zero", "random", "", "%20", "\u0664", "\ud800", "\0", "[/b]", "="),
        *("64x4", "32x2,64x4", "64x4,64x4", "16x9", "64x", "6x1", "64x4,", "64\u00d74"),
    ]
)
_LENGTHS = st.sampled_from([2, 3, 4, 8, 16, 33, 64, 96])
_SEEDS = st.sampled_from([0, 1, 123, 2**32 - 1])
_STARTS = st.sampled_from([0, 1, 2**31, 2**53, 2**62])


@st.composite
def _texts(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from([*TASKS, *TASKS, "", "mquar", "MQAR"]))
    own = sorted(TASKS[name].options()) if name in TASKS else []
    options = st.sampled_from(own or _OPTIONS) | st.sampled_from(_OPTIONS)
    pairs = draw(st.lists(st.tuples(options, _VALUES).map("=".join), max_size=3))
    mark = draw(st.sampled_from(["?", "?", "?", "", "&"]))
    return f"task:{name}{mark if pairs else ''}{'&'.join(pairs)}"


@given(_texts(), _LENGTHS, _SEEDS, _STARTS)
@example("task:mqar?settings=32x2,64x4&test=96x4", 64, 0, 0)
@example("task:mqar?writes=2&pairs=4&power=1e99", 64, 2**32 - 1, 2**62)
def test_tasks(text: str, length: int, seed: int, start: int) -> None:
    found = outcome(lambda: parse_task(text, length))
    if found.error is not None:
        return
    task = found.value
    assert parse_task(str(task), length) == task
    test = TaskRows(task.for_testing(), "test", seed)
    assert TaskCorpus.of(task, test).manifest["vocab_size"] == task.vocab_size
    for rows in (TaskRows(task, "train", seed), test):
        ids, labels = rows.arrays(seed, np.arange(start, start + 4))
        assert ids.shape == labels.shape == (4, rows.task.block_size)
        assert (ids >= 0).all()
        assert (ids < task.vocab_size).all()
        asked = labels != IGNORED
        assert asked.sum() == rows.predicted(seed, start, start + 4) > 0
        assert not asked[:, 0].any()
        assert (labels[asked] < task.vocab_size).all()
        again, _ = rows.arrays(seed, np.arange(start + 2, start + 3))
        assert (again[0] == ids[2]).all()
