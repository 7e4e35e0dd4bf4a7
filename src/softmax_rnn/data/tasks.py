"""Synthetic tasks as corpora: ``task:NAME?option=value&option=value``.

Each row is a pure function of a seed and a position, so no row is stored. Models shift labels: the
answer that follows token ``t`` is the label at ``t + 1``, and all other labels are -100. The label
at 0 is therefore always -100, and the last token is never a question.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from softmax_rnn._utils.errors import shown, unknown
from softmax_rnn._utils.validation import PositiveInt
from softmax_rnn.data.mqar import Mqar
from softmax_rnn.data.readings import Digits, ListOps
from softmax_rnn.data.rows import IGNORED
from softmax_rnn.data.task_base import PREFIX, AtLeastTwo, Integers, Stream, Task, below, distinct

__all__ = ["PREFIX", "TASKS", "Task", "is_task", "parse_task"]


@dataclass(frozen=True)
class Induction(Task):
    """Induction heads (Olsson et al. 2022; in this form Gu and Dao 2023, arXiv:2312.00752).

    Random tokens, among them a trigger. The trigger occurs again at position ``block_size - 2``,
    and the answer is the token that followed it the first time. The last token is random.

    Attributes:
        vocab: number of ordinary tokens; the next id is the trigger.
    """

    name: ClassVar[str] = "induction"
    vocab: AtLeastTwo = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_length(4, "the trigger, a token, the trigger and a last token")

    @property
    def vocab_size(self) -> int:
        """The ordinary tokens and the trigger."""
        return self.vocab + 1

    def predicted(self, seed: int, positions: Integers) -> Integers:
        """As in :class:`Task`: one."""
        return np.ones(len(positions), np.int64)

    def draw(self, seed: int, positions: Integers) -> tuple[Integers, Integers]:
        """As in :class:`Task`."""
        ids = below(self.vocab, seed, Stream.TOKENS, positions, self.block_size)
        labels = np.full_like(ids, IGNORED)
        first = below(self.block_size - 3, seed, Stream.PLACES, positions, 1)
        np.put_along_axis(ids, first, self.vocab, axis=1)
        ids[:, -2] = self.vocab
        labels[:, -1:] = np.take_along_axis(ids, first + 1, axis=1)
        return ids, labels


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Selective copying (Gu and Dao 2023, arXiv:2312.00752).

    Data tokens stand at random places among noise. Then come ``tokens`` markers, and after each
    one the next data token is the answer. One more marker ends the row.

    Attributes:
        tokens: data tokens of a row.
        vocab: number of kinds of data tokens; the next id is the noise, then comes the marker.
    """

    name: ClassVar[str] = "selective_copy"
    tokens: PositiveInt = 8
    vocab: AtLeastTwo = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_length(
            2 * self.tokens + 1, f"tokens={self.tokens}, as many markers and a last one"
        )

    @property
    def vocab_size(self) -> int:
        """The kinds of data tokens, the noise and the marker."""
        return self.vocab + 2

    def predicted(self, seed: int, positions: Integers) -> Integers:
        """As in :class:`Task`: ``tokens``."""
        return np.full(len(positions), self.tokens)

    def draw(self, seed: int, positions: Integers) -> tuple[Integers, Integers]:
        """As in :class:`Task`."""
        first_part = self.block_size - self.tokens - 1
        data = below(self.vocab, seed, Stream.TOKENS, positions, self.tokens)
        places = distinct(first_part, seed, Stream.PLACES, positions, self.tokens)
        ids = np.full((len(positions), self.block_size), self.vocab)
        ids[:, first_part:] = self.vocab + 1
        np.put_along_axis(ids, np.sort(places, axis=1), data, axis=1)
        labels = np.full_like(ids, IGNORED)
        labels[:, -self.tokens :] = data
        return ids, labels


@dataclass(frozen=True)
class _WordProblem(Task):
    """Random elements of a group; the answer at each token is the product so far."""

    def predicted(self, seed: int, positions: Integers) -> Integers:
        """As in :class:`Task`: all tokens but the last."""
        return np.full(len(positions), self.block_size - 1)

    def draw(self, seed: int, positions: Integers) -> tuple[Integers, Integers]:
        """As in :class:`Task`."""
        ids = below(self.vocab_size, seed, Stream.TOKENS, positions, self.block_size)
        table, products, width = self.table(), ids.copy(), 1
        while width < self.block_size:  # products of up to 2, 4, 8... elements
            products[:, width:] = table[products[:, :-width], products[:, width:]]
            width *= 2
        labels = np.full_like(ids, IGNORED)
        labels[:, 1:] = products[:, :-1]
        return ids, labels

    @staticmethod
    @abc.abstractmethod
    def table() -> Integers:
        """[elements, elements] the product of each element with each later one."""


@dataclass(frozen=True)
class Parity(_WordProblem):
    """Random bits; the answer at each one is the parity of the bits so far."""

    name: ClassVar[str] = "parity"

    @property
    def vocab_size(self) -> int:
        """2."""
        return 2

    @staticmethod
    def table() -> Integers:
        """The sum modulo 2."""
        return np.array([[0, 1], [1, 0]])


@dataclass(frozen=True)
class S5(_WordProblem):
    """The word problem of the permutations of five things (Merrill et al. 2024, arXiv:2404.08819).

    A fixed number of layers of attention or of linear recurrences with diagonal decays cannot solve
    it at every length, unless TC0 = NC1.

    Token ``i`` is the permutation in place ``i`` of the lexicographic order of
    ``itertools.permutations(range(5))``; it maps ``x`` to its entry ``x``. The answer is the
    permutation that applies the first token first: ``x`` becomes ``g_t[...g_2[g_1[x]]]``.
    """

    name: ClassVar[str] = "s5"

    @property
    def vocab_size(self) -> int:
        """120."""
        return 120

    @staticmethod
    @functools.cache
    def table() -> Integers:
        """The permutation that applies the first one, then the second one."""
        elements = np.array(list(itertools.permutations(range(5))))
        digits = 5 ** np.arange(4, -1, -1)  # lexicographic order is that of numbers in base 5
        composed = elements[:, elements].swapaxes(0, 1)  # [first, second, x]: second[first[x]]
        return np.searchsorted(elements @ digits, composed @ digits)


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Mqar, Induction, SelectiveCopy, Parity, S5, ListOps, Digits)
}


def is_task(corpus: str) -> bool:
    """Whether a corpus is a task."""
    return corpus.startswith(PREFIX)


def parse_task(text: str, block_size: int) -> Task:
    """The task that ``text`` describes: ``task:mqar?pairs=16&vocab=128``.

    Raises:
        ValueError: on an unknown name or option, or an invalid value.
    """
    if not text.startswith(PREFIX):
        raise ValueError(f"A task is written {PREFIX}NAME?option=value, not {shown(text)}.")
    name, mark, rest = text.removeprefix(PREFIX).partition("?")
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    allowed, options = TASKS[name].options(), dict[str, Any]()
    if mark and not allowed:
        raise ValueError(f"{PREFIX}{name} has no options, but {shown(rest)} is given.")
    for part in rest.split("&") if mark else ():
        option, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"{PREFIX}{name}: an option is written option=value, not {shown(part)}."
            )
        if option not in allowed:
            raise unknown(f"option of {PREFIX}{name}:", option, allowed)
        if option in options:
            raise ValueError(f"{PREFIX}{name}: the option {option} is given twice.")
        options[option] = _value(value)
    return TASKS[name](block_size, **options)


def _value(text: str) -> int | float | str:
    if re.search(r"[^\x21-\x7e]|_", text):  # int and float read spaces, 1_0 and other digits, too
        return text
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
